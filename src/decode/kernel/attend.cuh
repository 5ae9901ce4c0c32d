// SPDX-License-Identifier: Apache-2.0
// Attention of few rows over many keys, the column engine: K and V are left operands of mma.sync, straight from shared
// memory, and the rows (queries times the heads of a KV head) are columns, so that no row is padding beyond a multiple
// of eight and no column's bits depend on its neighbours. Persistent: blocks take nodes of the merge tree from a queue;
// the last of a family to come merges it. Device code; implements docs/algorithm.md, "Online softmax" and "Merge".
#pragma once

#include "decode/kernel/rows.cuh"
#include "decode/kernel/state.cuh"
#include "decode/layout.hpp"
#include "gpu/kernel/lanes.cuh"
#include "gpu/kernel/matrix.cuh"
#include "gpu/kernel/quad.cuh"
#include "gpu/kernel/scores.cuh"

namespace tessera::decode {

template <Config config>
struct Attend : Rows<config> {
  using Base = Rows<config>;
  using Base::layout, Base::R, Base::T, Base::p, Base::w;
  static constexpr int columns = R / 8, values = config.Dv / 64;
  static constexpr int key_warps = T / 16;  // those that multiply S: 16 keys each
  using Scores = float[columns][4];         // S^T: keys are rows. Value e of four: key e / 2, column e % 2

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  State<config> state{};

  using Base::Base;
  template <class Thing>
  __device__ Thing* shared(int offset) const {
    return Base::template shared<Thing>(offset);
  }

  // --- step 1: S^T = K Q^T of a warp's 16 keys

  template <int first, int end>
  __device__ void multiply_KQ(Scores& S, UInt32 k_lane, UInt32 q_lane) const {
#pragma unroll
    for (int c = 0; c < columns; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) S[c][e] = 0;
#pragma unroll
    for (int k = first; k < end; ++k) {  // 32 dims
      UInt32 a[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half)
        gpu::load_matrices<false>(
            a[half], gpu::turned(k_lane, gpu::column_turn(2 * k + half)) + gpu::panel_step(T, 2 * k + half));
#pragma unroll
      for (int c = 0; c < columns; ++c) {
        UInt32 b[4];
        gpu::load_matrices<false>(b, gpu::turned(q_lane, q_turn(k)) + q_step(R, k) + c * 8 * gpu::panel_row_bytes);
        gpu::multiply<config.element, false>(S[c], a[0], b[0], b[1]);
        gpu::multiply<config.element, false>(S[c], a[1], b[2], b[3]);
      }
    }
  }
  __device__ void multiply_KQ(Scores& S, int stage) const {
    constexpr int steps = config.D / 32;
    const UInt32 k_lane = this->address(layout.K + stage * layout.k_bytes) + warp * gpu::bytes_of_16_rows +
                          gpu::lane_byte(gpu::a_row(lane), gpu::a_column(lane));
    const UInt32 q_lane = this->address(layout.Q) + gpu::tile_byte(R, q_row(lane), q_dim(lane));
    if constexpr (config.halves_S) {
      Scores rest;
      multiply_KQ<0, steps / 2>(S, k_lane, q_lane);
      multiply_KQ<steps / 2, steps>(rest, k_lane, q_lane);
#pragma unroll
      for (int c = 0; c < columns; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) S[c][e] += rest[c][e];
    } else {
      multiply_KQ<0, steps>(S, k_lane, q_lane);
    }
  }

  // What the rule of scores asks about one element.
  struct Pair {
    Int32 key;
    Int64 origin;
    __device__ float distance() const { return float(key - origin); }
    __device__ float bias() const { return 0; }
  };
  // Products become scores in units of log2(e); -inf where a row does not see the key.
  __device__ void score(Scores& S, Int32 tile) const {
    constexpr ScoreOptions options = config.options.options();
    const Int32 first = tile * T + 16 * warp + lane / 4;
    const bool cut = tile * T < w.rows.whole.begin || tile * T + T > w.rows.whole.end;
#pragma unroll
    for (int c = 0; c < columns; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const Column& of = shared<const Column>(layout.columns)[State<config>::column(c, e)];
        const ScoreNumbers<float> numbers =
            score_numbers(options, p.call.x.score_scale, p.call.x.parameters, of.slope, log2e<float>);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Pair pair{first + 8 * half, of.origin};
          float& x = S[c][2 * half + e];
          x = ScoreRule<gpu::ScoreMath>::score(options, numbers, x * numbers.factor, pair);
          if (cut && (pair.key < of.begin || pair.key >= of.end)) x = minus_infinity<float>;
        }
      }
  }

  // --- step 2: online softmax of the columns

  // The largest score of each column of the tile, for all warps.
  __device__ void share_maxima(const Scores& S) const {
#pragma unroll
    for (int c = 0; c < columns; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float top = fmaxf(S[c][e], S[c][2 + e]);
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2)
          top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, distance));
        if (lane < 4) shared<float>(layout.maxima)[warp * R + State<config>::column(c, e)] = top;
      }
  }
  // m, what exponents are relative to, and what l must be multiplied by; O follows.
  __device__ void raise_maxima(float (&base)[columns][2], float (&alpha)[columns][2]) {
    bool changes = false;
#pragma unroll
    for (int c = 0; c < columns; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float before = state.m[c][e];
#pragma unroll
        for (int n = 0; n < key_warps; ++n)
          state.m[c][e] = fmaxf(state.m[c][e], shared<const float>(layout.maxima)[n * R + State<config>::column(c, e)]);
        base[c][e] = exponent_base(state.m[c][e]);
        alpha[c][e] = gpu::exp2_of(before - base[c][e]);
        changes = changes || alpha[c][e] != 1;
      }
    if (__any_sync(0xffffffffu, changes)) state.scale(alpha);
  }
  // P of a warp's 16 keys, in 16 bits, a row for each key; l of what it was before it was rounded.
  __device__ void store_P(const Scores& S, const float (&base)[columns][2], const float (&alpha)[columns][2]) {
    const int key = 16 * warp + lane / 4;
    const UInt32 p_lane = this->address(layout.P) + p_byte(R, key, lane % 4 * 2);
#pragma unroll
    for (int c = 0; c < columns; ++c) {
      float P[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) P[e] = gpu::exp2_of(S[c][e] - base[c][e % 2]);
#pragma unroll
      for (int e = 0; e < 2; ++e) state.l[c][e] = fmaf(state.l[c][e], alpha[c][e], P[e] + P[2 + e]);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        gpu::store_pair(gpu::turned(p_lane, p_turn(c)) + half * 8 * R * 2,
                        gpu::packed<config.element>(P[2 * half], P[2 * half + 1]));
    }
  }

  // --- step 3: O^T += V^T P^T, of a warp's 16 dims of every 64

  __device__ void multiply_VP(int stage) {
    const UInt32 v_lane = this->address(layout.V + stage * layout.v_bytes) +
                          gpu::turned(gpu::lane_byte(v_key(lane), v_dim(lane)), gpu::column_turn(warp));
    const UInt32 p_lane = this->address(layout.P) + p_byte(R, p_key(lane), 0);
#pragma unroll
    for (int j = 0; j < T / 32; ++j) {  // 32 keys
      UInt32 b[columns][4];
#pragma unroll
      for (int c = 0; c < columns; ++c) gpu::load_matrices<true>(b[c], gpu::turned(p_lane, p_turn(c)) + j * 32 * R * 2);
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int v = 0; v < values; ++v) {
          UInt32 a[4];
          gpu::load_matrices<true>(a, v_lane + v * T * gpu::panel_row_bytes + (2 * j + half) * gpu::bytes_of_16_rows);
#pragma unroll
          for (int c = 0; c < columns; ++c)
            gpu::multiply<config.element, false>(state.O[v][c], a, b[c][2 * half], b[c][2 * half + 1]);
        }
    }
  }

  // --- leaves, and the stack of a block

  // A tile: the copies of the one `stages` - 1 further are issued, and the rows of the one after that looked for.
  __device__ void add_tile(Int32 tile, Int32 end) {
    gpu::wait_copies<config.stages - 2>();
    __syncthreads();  // this tile has arrived, and all warps are done with the one before
    if (tile + config.stages - 1 < end) this->copy_tile(tile + config.stages - 1);
    gpu::commit_copies();
    const Int64 place = this->find_row(tile + config.stages);
    const int stage = tile % config.stages;
    Scores S;
    if (warp < key_warps) {
      multiply_KQ(S, stage);
      score(S, tile);
      share_maxima(S);
    }
    this->keep_row(tile + config.stages, place);
    __syncthreads();  // maxima
    float base[columns][2], alpha[columns][2];
    raise_maxima(base, alpha);
    if (warp < key_warps) store_P(S, base, alpha);
    __syncthreads();  // P
    multiply_VP(stage);
  }

  // l of a leaf, from the lanes and warps that have summed parts of it, in a fixed order: all threads get it.
  __device__ void share_sums() {
#pragma unroll
    for (int c = 0; c < columns; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float sum = state.l[c][e];
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        if (lane < 4) shared<float>(layout.sums)[warp * R + State<config>::column(c, e)] = sum;
      }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < columns; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float* sums = shared<const float>(layout.sums) + State<config>::column(c, e);
        state.l[c][e] = (sums[0] + sums[R]) + (sums[2 * R] + sums[3 * R]);
      }
  }

  __device__ float* stack_at(int level) const {
    constexpr int numbers = state_floats(R, config.Dv);
    if (level < config.levels) return shared<float>(layout.stack) + level * numbers;
    return p.memory.stacks + (Int64(blockIdx.x) * p.memory.stack_levels + level - config.levels) * numbers;
  }

  // The leaves of the item one after another, merged as a binary counter counts: node n of a level waits on the stack
  // for node n + 1 if n is even. What is left in the end lacks later siblings, which changes nothing.
  __device__ void attend_leaves() {
    const Int32 end = Int32(ceil_div(w.end, T));
    Int32 tile = w.begin / T;
    for (int n = 0; n < config.stages; ++n) this->keep_row(tile + n, this->find_row(tile + n));
    __syncthreads();
    this->copy_Q();
#pragma unroll
    for (int n = 0; n < config.stages - 1; ++n) {
      if (tile + n < end) this->copy_tile(tile + n);
      gpu::commit_copies();
    }
    UInt32 held = 0;  // levels of the stack that hold a state
    for (Int32 leaf = w.leaves.first; leaf < w.leaves.end; ++leaf) {
      state.clear();
      const Int32 next = (leaf + 1) * (leaf_keys / T), leaf_end = next < end ? next : end;
#pragma unroll 1
      for (; tile < leaf_end; ++tile) add_tile(tile, end);
      share_sums();
      const UInt32 number = leaf - (w.item.node << w.level);
      const bool last = leaf + 1 == w.leaves.end;
      int level = 0;
      for (; (number >> level & 1) || (last && held >> level); ++level)
        if (held >> level & 1) state.merge_after(stack_at(level)), held &= ~(1u << level);
      if (!last) state.store(stack_at(level)), held |= 1u << level;
    }
    gpu::wait_copies<0>();
  }

  // --- siblings in other blocks

  // The item's state becomes that of the root, if this block is the last of every family on the way. False: another
  // block will go on.
  __device__ bool climb() {
    constexpr int numbers = state_floats(R, config.Dv);
    Work& work = *shared<Work>(layout.work);
    Nodes nodes = w.item.siblings;
    Int32 node = w.item.node;
    for (int climbs = 0; nodes.count() > 1; ++climbs) {
      const Int32 parent = node >> family_levels, family_first = parent << family_levels;
      const Int32 first = family_first > nodes.first ? family_first : nodes.first;
      const Int32 end = family_first + family < nodes.end ? family_first + family : nodes.end;
      // The state of a node lies in the slot of the first item under it.
      const auto slot_of = [&](Int32 n) {
        const Int32 item = n << climbs * family_levels;
        return w.item.slot + (item > w.item.siblings.first ? item - w.item.siblings.first : 0);
      };
      if (end - first > 1) {
        state.store(p.memory.states + Int64(slot_of(node)) * numbers);
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
          const Int64 count = Int64(climbs) * p.memory.most_slots + slot_of(first);
          work.last_come = atomicAdd(&p.memory.counts[count], 1u) + 1 == UInt32(end - first);
        }
        __syncthreads();
        if (!work.last_come) return false;
        __threadfence();
        const auto at = [&](int n) { return p.memory.states + Int64(slot_of(family_first + n)) * numbers; };
        merge_family(state, Family<decltype(at)>{first - family_first, end - family_first, at},
                     shared<float>(layout.weights));
        __syncthreads();  // of the weights, which the next family needs room for
      }
      nodes = nodes.above(family_levels), node = parent;
    }
    return true;
  }
  // --- the end: the sink, O / l and LSE

  // Rows that see no key: O = 0, LSE = -inf, or the sink.
  __device__ void write() {
    float factor[columns][2];
#pragma unroll
    for (int c = 0; c < columns; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = State<config>::column(c, e);
        const bool exists = column < w.rows.count;
        const Int32 row = w.rows.first + (exists ? column : 0);
        const Int32 i = row / p.group, h = w.item.kv * p.group + row % p.group;
        if (p.call.x.sinks) state.merge_sink(c, e, p.call.x.sinks[h * p.call.x.sink_head] * log2e<float>);
        const float l = state.l[c][e];
        factor[c][e] = l == 0 ? 0 : 1 / l;
        if (State<config>::speaks() && exists && p.call.lse.data)
          *gpu::number_of(p.call.lse, w.item.b, w.q_begin + i, h) = gpu::natural_lse_by_mantissa(state.m[c][e], l);
      }
    state.scale(factor);
    float* const out = shared<float>(layout.out);
    constexpr int pitch = out_pitch(config.Dv);
#pragma unroll
    for (int v = 0; v < values; ++v)
#pragma unroll
      for (int c = 0; c < columns; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          out[State<config>::column(c, e % 2) * pitch + 64 * v + 16 * warp + lane / 4 + e / 2 * 8] = state.O[v][c][e];
    __syncthreads();
    for (int n = threadIdx.x; n < w.rows.count * (config.Dv / 8); n += threads) {
      const int r = n / (config.Dv / 8), first = n % (config.Dv / 8) * 8;
      if (first < p.Dv) store_dims(w.rows.first + r, first, out + r * pitch + first);
    }
  }
  // Eight dims of a row.
  __device__ void store_dims(Int32 row, int first, const float* x) const {
    auto* to =
        gpu::row_of<config.o>(p.call.o, w.item.b, w.q_begin + row / p.group, w.item.kv * p.group + row % p.group) +
        first;
    if constexpr (config.o == Element::f32) {
      for (int n = 0; n < 8 && first + n < p.Dv; ++n) to[n] = x[n];
    } else {
      UInt32 pairs[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) pairs[n] = gpu::packed<config.o>(x[2 * n], x[2 * n + 1]);
      gpu::store_columns(to, pairs, p.Dv - first);
    }
  }

  // One work item; false: there was none.
  __device__ bool run() {
    __syncthreads();  // all are done with the one before
    if (threadIdx.x == 0) take_work(p, *shared<Work>(layout.work));
    __syncthreads();
    if (!w.exists) return false;
    if (threadIdx.x < R) shared<Column>(layout.columns)[threadIdx.x] = column_of(p, w, threadIdx.x);
    state.clear();
    if (w.begin < w.end) attend_leaves();
    __syncthreads();  // the ring is free
    if (climb()) write();
    return true;
  }
};

template <Config config>
__device__ void attend(const Params& p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Attend<config> block(p, memory);
  while (block.run()) {
  }
}

}  // namespace tessera::decode
