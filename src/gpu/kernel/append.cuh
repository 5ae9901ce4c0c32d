// SPDX-License-Identifier: Apache-2.0
// Append: a warp per row, of new keys, of values and of queries, which it rotates, divides by its scale, rounds and
// stores in its place of the cache. Arithmetic is that of src/cpu/append.cpp, step by step, in f32: the same bits, but
// for the payloads of NaN. Numbers of tables, lengths, slots and positions are read here, where nobody can refuse them:
// a row whose place does not exist is left out, and the status word says so. Device code; implements docs/algorithm.md,
// "Append".
#pragma once

#include "gpu/append_params.hpp"
#include "gpu/kernel/common.cuh"
#include "gpu/kernel/lanes.cuh"

namespace tessera::gpu {

// --- numbers of a type that is known at run time, `count` at a time

template <class T, int count>
struct alignas(count * sizeof(T)) Chunk {
  T x[count];
};

template <class T, int count>
__device__ inline void load_as(const void* data, Int64 at, float (&x)[count]) {
  const auto chunk = *reinterpret_cast<const Chunk<T, count>*>(static_cast<const T*>(data) + at);
#pragma unroll
  for (int n = 0; n < count; ++n) x[n] = widen(chunk.x[n]);
}
template <int count>
__device__ inline void load_numbers(const void* data, Element type, Int64 at, float (&x)[count]) {
  if (type == Element::f16) return load_as<F16>(data, at, x);
  if (type == Element::bf16) return load_as<BF16>(data, at, x);
  load_as<float>(data, at, x);
}

template <class T, int count>
__device__ inline void store_as(void* data, Int64 at, const float (&x)[count]) {
  Chunk<T, count> chunk;
#pragma unroll
  for (int n = 0; n < count; ++n) chunk.x[n] = narrow<T>(x[n]);
  *reinterpret_cast<Chunk<T, count>*>(static_cast<T*>(data) + at) = chunk;
}
template <int count>
__device__ inline void store_numbers(void* data, Element type, Int64 at, const float (&x)[count]) {
  if (type == Element::f16) return store_as<F16>(data, at, x);
  if (type == Element::bf16) return store_as<BF16>(data, at, x);
  if (type == Element::e4m3) return store_as<E4M3>(data, at, x);
  if (type == Element::i8) return store_as<Int8>(data, at, x);
  store_as<float>(data, at, x);
}

// Bits as they are, of NaN too.
template <class Bits, int count>
__device__ inline void copy_bits(const void* from, Int64 at, void* to, Int64 to_at) {
  *reinterpret_cast<Chunk<Bits, count>*>(static_cast<Bits*>(to) + to_at) =
      *reinterpret_cast<const Chunk<Bits, count>*>(static_cast<const Bits*>(from) + at);
}

// --- one row

// Its rotation: rows of cosines and sines.
struct Turn {
  Int64 cos, sin;
  int half;  // 0: none
};

struct RowMove {
  const void* from;
  void* to;
  Element type, to_type;
  Int64 at, to_at;  // of the first element
  int width;
};

// Dims that are divided by one scale.
struct Group {
  int first, end;
  __device__ bool has(int d) const { return d >= first && d < end; }
};

// A chunk is of one group: groups begin at multiples of it.
template <int count>
struct RowMover {
  const Rotary& rotary;
  const RowMove& row;
  const Turn& turn;
  const int lane = threadIdx.x % 32;

  // Every number, rotated: take(d, x) is given `count` of them, beginning with element d. A pair is one lane's, which
  // loads it before it is stored: a row may be rotated in place.
  template <class Take>
  __device__ void each_rotated(Take take) const {
    for (int n = lane * count; n < turn.half; n += 32 * count) {
      float x[2 * count], low[count], high[count], c[count], s[count];
      const int first = rotary.interleaved ? 2 * n : n, second = rotary.interleaved ? 2 * n + count : turn.half + n;
      load_numbers(row.from, row.type, row.at + first, low);
      load_numbers(row.from, row.type, row.at + second, high);
      load_numbers(rotary.cos, rotary.cos_type, turn.cos + n, c);
      load_numbers(rotary.sin, rotary.sin_type, turn.sin + n, s);
#pragma unroll
      for (int i = 0; i < count; ++i) x[i] = low[i], x[count + i] = high[i];
      if (rotary.interleaved)
        rotate<2, 1>(x, c, s);
      else
        rotate<1, count>(x, c, s);
#pragma unroll
      for (int i = 0; i < count; ++i) low[i] = x[i], high[i] = x[count + i];
      take(first, low), take(second, high);
    }
  }
  // Pairs are `step` numbers apart, and the two of a pair `apart`.
  template <int step, int apart>
  __device__ static void rotate(float (&x)[2 * count], const float (&c)[count], const float (&s)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const float a = x[i * step], b = x[i * step + apart];
      x[i * step] = a * c[i] - b * s[i];
      x[i * step + apart] = a * s[i] + b * c[i];
    }
  }
  template <class Take>
  __device__ void each_other(Take take) const {
    for (int d = 2 * turn.half + lane * count; d < row.width; d += 32 * count) {
      float x[count];
      load_numbers(row.from, row.type, row.at + d, x);
      take(d, x);
    }
  }

  // The largest number of the group over the largest of the type; NaN and infinities aside.
  __device__ float fitting_scale(const Group& group) const {
    float largest = 0;
    const auto look = [&](int d, const float(&x)[count]) {
      if (!group.has(d)) return;
#pragma unroll
      for (int n = 0; n < count; ++n) {
        const float size = x[n] < 0 ? -x[n] : x[n];
        if (size > largest && size <= __builtin_bit_cast(float, 0x7f7fffffu)) largest = size;
      }
    };
    each_rotated(look), each_other(look);
    return max_over_lanes<32>(largest) / (row.to_type == Element::i8 ? 127.f : 448.f);
  }

  // A group, divided by its scale; without scales, the row. What has a scale of 0 means 0, whatever is stored; NaN
  // stays.
  __device__ void move(const Group& group, bool divides, float scale) const {
    const auto store = [&](int d, const float(&x)[count]) {
      if (!group.has(d)) return;
      float y[count];
#pragma unroll
      for (int n = 0; n < count; ++n) y[n] = !divides ? x[n] : scale == 0 ? x[n] * 0 : x[n] / scale;
      store_numbers(row.to, row.to_type, row.to_at + d, y);
    };
    each_rotated(store);
    if (divides || row.type != row.to_type) return each_other(store);
    for (int d = 2 * turn.half + lane * count; d < row.width; d += 32 * count) {
      if (row.type == Element::f32)
        copy_bits<UInt32, count>(row.from, row.at + d, row.to, row.to_at + d);
      else
        copy_bits<UInt16, count>(row.from, row.at + d, row.to, row.to_at + d);
    }
  }
};

// A row, all that is known of it: one text moves rows of every kind, or the kernel would take long to compile.
struct RowJob {
  RowMove row;
  Turn turn;
  float* scale;  // null: none
  bool computes_scale;
  Int64 scale_group;
  int group_dims;
};

template <int count>
__device__ inline void move_row(const Rotary& rotary, const RowJob& job) {
  const RowMover<count> mover{rotary, job.row, job.turn};
  if (!job.scale) return mover.move({0, job.row.width}, false, 1);
  float* at = job.scale;
  for (int first = 0; first < job.row.width; first += job.group_dims, at += job.scale_group) {
    const Group group{first, first + job.group_dims};
    const float scale = job.computes_scale ? mover.fitting_scale(group) : *at;
    if (job.computes_scale && mover.lane == 0) *at = scale;
    mover.move(group, true, scale);
  }
}

// --- where a row goes

// A new token: number t of the n new ones of sequence b, at `place` of the cache. Packed rows begin with `first`.
struct NewToken {
  Int32 b;
  Int64 t, first, place;
  bool exists;
};

struct Append {
  const AppendParams& p;

  __device__ void report(Int32 bit) const {
    if (p.pages.status && threadIdx.x % 32 == 0) atomicOr(p.pages.status, bit);
  }

  // Token `number` of those that are rows of [B,tokens] or of a packed tensor.
  __device__ NewToken token_of(Int64 number, Int64 tokens) const {
    const BlockPlace at = place_of(number, 1, p.B, tokens, p.cu_seqlens_new);
    const Range packed = p.cu_seqlens_new.data ? packed_rows(p.cu_seqlens_new, at.b, tokens) : Range{};
    const Int64 added = p.cu_seqlens_new.data ? packed.size() : p.tokens;
    NewToken out{at.b, at.first, packed.begin, 0, p.cu_seqlens_new.data == nullptr || at.first < packed.size()};
    if (out.exists && p.seqused_k.data) out.place = p.seqused_k[at.b] - added + at.first;
    return out;
  }

  struct Place {
    Int64 page, row;  // page: the sequence, where it has none
    bool exists;
  };
  __device__ Place nowhere(Int32 bit) const {
    if (bit) report(bit);
    return {0, 0, false};
  }
  __device__ Place place_in_cache(const NewToken& token, const PageTable& table) const {
    if (p.slots.data) {
      const Int64 slot = p.slots.at(token.b, token.t);
      if (slot < 0) return nowhere(0);
      if (slot >= p.capacity) return nowhere(page_outside_pool);
      return {slot / p.pages.size, slot % p.pages.size, true};
    }
    if (!table.entries) {
      if (token.place < 0 || token.place >= p.capacity) return nowhere(beyond_bounds);
      return {token.b, token.place, true};
    }
    Int64 first = token.b * table.sequence, places = p.capacity;
    if (p.pages.indptr.data) {
      const Range listed = packed_rows(p.pages.indptr, token.b, p.pages.entries);
      first = listed.begin * table.entry, places = listed.size() * p.pages.size;
    }
    if (token.place < 0 || token.place >= places) return nowhere(beyond_bounds);
    const Int64 page = table.entries[first + token.place / p.pages.size * table.entry];
    if (page < 0 || page >= table.pages) return nowhere(page_outside_pool);
    return {page, token.place % p.pages.size, true};
  }

  // False: rotary_cos has no such position.
  __device__ bool find_turn(Int64 position, Turn& turn) const {
    if (position < 0 || position >= p.rotary.positions) {
      report(beyond_bounds);
      return false;
    }
    turn = {position * p.rotary.cos_row, position * p.rotary.sin_row, p.rotary.half};
    return true;
  }

  // False: the row is left out.
  __device__ bool find_cache_row(const AppendSide& side, const PageTable& table, bool rotates, Int64 number, Int32 h,
                                 RowJob& job) const {
    const NewToken token = token_of(number, p.tokens);
    if (!token.exists) return false;
    const Place place = place_in_cache(token, table);
    if (!place.exists) return false;
    const Int64 t = token.first + token.t;
    if (rotates && p.rotary.half > 0 &&
        !find_turn(p.positions.data ? p.positions.at(token.b, t) : token.place, job.turn))
      return false;
    const TokenRef &from = side.from.rows, &to = side.to.rows;
    job.row = {from.data,
               to.data,
               side.from.type,
               side.to.type,
               token.b * from.batch + t * from.token + h * from.head,
               place.page * to.batch + place.row * to.token + h * to.head,
               side.width};
    if (side.scale.data) job.scale = side.scale.at(token.b, place.page, place.row, h);
    job.computes_scale = side.computes_scale;
    job.scale_group = side.scale_group, job.group_dims = side.group_dims;
    return true;
  }

  __device__ bool find_query_row(Int64 number, Int32 h, RowJob& job) const {
    const NewToken token = token_of(number, p.q_tokens);
    if (!token.exists) return false;
    const TokenNumbers& given = p.q_positions.data ? p.q_positions : p.positions;
    const Int64 t = token.first + token.t;
    if (!find_turn(given.data ? given.at(token.b, t) : token.place, job.turn)) return false;
    const TokenRef &from = p.q.rows, &to = p.q_out.rows;
    job.row = {from.data,
               to.data,
               p.q.type,
               p.q_out.type,
               token.b * from.batch + t * from.token + h * from.head,
               token.b * to.batch + t * to.token + h * to.head,
               p.k.width};
    return true;
  }

  // Keys, then values, then queries; heads count fastest.
  __device__ bool find(Int64 n, RowJob& job) const {
    const Int64 side = p.numbers * p.Hk;
    if (n >= 2 * side) return find_query_row((n - 2 * side) / p.Hq, Int32((n - 2 * side) % p.Hq), job);
    const bool value = n >= side;
    n -= value ? side : 0;
    return find_cache_row(value ? p.v : p.k, value ? p.pages.v : p.pages.k, !value, n / p.Hk, Int32(n % p.Hk), job);
  }
};

__device__ inline void append(const AppendParams& p) {
  constexpr int warps = append_threads / 32;
  const Append work{p};
  for (Int64 n = Int64(blockIdx.x) * warps + threadIdx.x / 32; n < p.rows(); n += Int64(gridDim.x) * warps) {
    RowJob job{};
    if (!work.find(n, job)) continue;
    if (p.wide)
      move_row<4>(p.rotary, job);
    else
      move_row<1>(p.rotary, job);
  }
}

}  // namespace tessera::gpu
