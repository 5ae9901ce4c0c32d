// SPDX-License-Identifier: Apache-2.0
// What a block of the Hopper kernels works on: tiles of queries of one head, and the tiles of keys that each sees. One
// thread, the scheduler, finds them out ahead of time and describes them in shared memory, for the loader and the
// consumers alike: they cannot disagree, and none of them waits for the arithmetic. Device code.
#pragma once

#include "gpu/kernel/pages.cuh"
#include "sm90/config.hpp"
#include "sm90/params.hpp"
#include "sm90/ptx/tma.cuh"

namespace tessera::sm90 {

// Tokens are counted in 32 bits, as tensor copies count them.
template <Config config>
struct Work {
  Int32 b, h, kv, tensor_b;       // tensor_b: where tensor copies count sequences; all packed ones are one
  Int32 first, queries, q_begin;  // the tile's first query, of so many in its sequence, which begins there
  Int32 keys, k_begin;            // of the sequence
  Int32 begin, end;               // tiles of keys, at absolute positions
  Int32 used;                     // rows of the last tile that are the sequence's, if others' keys follow
  Int64 shift;                    // of the diagonal: what ALiBi measures distances from
  Int32 low, high;                // of the keys that the tile's query 0 sees; those of query i are i more
  // For each 64 queries: the tiles of keys that they see, and those of them that the band leaves whole.
  Int32 own_begin[config.warpgroups], own_end[config.warpgroups];
  Int32 full_begin[config.warpgroups], full_end[config.warpgroups];

  __device__ bool none() const { return begin < 0; }  // there is no more work
  __device__ bool empty() const { return begin >= end; }
  __device__ bool empty(int warpgroup) const { return empty() || own_begin[warpgroup] >= own_end[warpgroup]; }
  // Query of the sequence that is row `row` of a warpgroup's tile.
  __device__ Int32 query(int warpgroup, int row) const { return first + 64 * warpgroup + row; }
  __device__ TilePlace queries_at(int warpgroup) const { return {q_begin + query(warpgroup, 0), h, tensor_b}; }
  __device__ TilePlace keys_at(Int32 tile) const { return {k_begin + tile * config.block_keys, kv, tensor_b}; }
};
static_assert(sizeof(Work<Config{.warpgroups = 3}>) <= work_bytes);

// Where the keys of a tile are listed, if they lie in pages.
struct alignas(16) Listing {
  Int64 k_entry, v_entry;  // the sequence's first entry of each table
  Int32 leftpad;
  Int32 begin, end;  // keys that some query of the tile sees: of pages without any, entries are not read
};
static_assert(sizeof(Listing) == listing_bytes);

template <Config config>
using Params = typename gpu::Chosen<config.paged, PagedParams, ForwardParams>::Type;

// The sequence of tile `number`.
template <Config config>
__device__ inline gpu::DeviceSequence sequence_of(const Params<config>& p, Int32 number, Int32 b, Listing& listing) {
  const gpu::Question& x = p.call.x;
  if constexpr (config.paged) {
    // There are at least as many tiles as sequences: with each, one is looked at.
    if (p.pages.status && number < x.B && gpu::is_cut(x, p.pages, p.most, number))
      atomicOr(p.pages.status, gpu::beyond_bounds);
    gpu::PagedSequence of = gpu::paged_sequence(x, p.pages, p.most, b);
    if (of.s.nq < p.least_queries) of.s.nq = 0;
    listing.k_entry = gpu::first_entry(p.pages, of, p.pages.k, b);
    listing.v_entry = gpu::first_entry(p.pages, of, p.pages.v, b);
    listing.leftpad = Int32(of.leftpad);
    return of.s;
  } else {
    return gpu::sequence_of(x, b);
  }
}

// Describes tile `number`, or that there is none, where `w` lies: kept in registers, it would be more than the
// scheduler has.
template <Config config>
__device__ inline void describe_work(const Params<config>& p, Int32 number, Work<config>& w, Listing& listing) {
  w.begin = w.end = -1;
  if (number >= p.tiles) return;
  const gpu::Question& x = p.call.x;
  const bool packed = x.cu_seqlens_q.data != nullptr;
  const Int32 section_tiles = p.section * p.tiles_per_head;
  const Int32 section = number / section_tiles, rest = number % section_tiles;
  const Int32 head = section * p.section + rest % p.section;
  const Int32 tile = p.tiles_per_head - 1 - rest / p.section;  // the last see the most, when causal
  if (packed) {
    const gpu::BlockPlace at = gpu::place_of(tile, rows_of(config), x.B, x.Nq, x.cu_seqlens_q);
    w.b = at.b, w.h = head, w.first = Int32(at.first);
  } else {
    w.b = head / x.Hq, w.h = head % x.Hq, w.first = tile * rows_of(config);
  }
  w.tensor_b = packed ? 0 : w.b;
  w.kv = w.h / (x.Hq / x.Hk);
  const gpu::DeviceSequence s = sequence_of<config>(p, number, w.b, listing);
  w.queries = Int32(s.nq), w.q_begin = Int32(s.q_begin), w.keys = Int32(s.nk), w.k_begin = Int32(s.k_begin);

  w.shift = s.shift;
  constexpr Int64 far = Int64(1) << 30;
  w.low = Int32(clamp(s.mask.low + w.first, -far, far)), w.high = Int32(clamp(s.mask.high + w.first, -far, far));

  // From here on the mask is the tile's own: its first query is query 0. What is known is read again where it lies: the
  // scheduler has few registers.
  asm volatile("" ::: "memory");
  // In pages, anything does where the last one is not full; then the table has room for more keys.
  const bool others_follow = Int64(w.k_begin) + w.keys < x.Nk;
  constexpr Int32 block = config.block_keys;
  const auto seen_by = [&](Int32 begin, Int32 end) {
    return visible_keys({.low = w.low, .high = w.high, .keys = w.keys}, {begin, lesser(end, w.queries - w.first)});
  };
  const Range seen = seen_by(0, rows_of(config));
  if constexpr (config.paged) listing.begin = Int32(seen.begin), listing.end = Int32(seen.end);
  w.begin = Int32(seen.begin) / block;
  w.end = seen.empty() ? w.begin : (Int32(seen.end) + block - 1) / block;
  w.used = others_follow ? Int32(lesser(w.keys - (w.end - 1) * block, block)) : block;
#pragma unroll 1
  for (int g = 0; g < config.warpgroups; ++g) {
    const Range own = seen_by(64 * g, 64 * g + 64);
    w.own_begin[g] = w.own_end[g] = w.begin;
    if (!own.empty()) {
      w.own_begin[g] = Int32(lesser(Int32(own.begin) / block, w.begin + most_passed(config)));
      w.own_end[g] = Int32(greater((Int32(own.end) + block - 1) / block, w.end - most_passed(config)));
    }
    const Int32 low = w.low + 64 * g, high = w.high + 64 * g;
    w.full_begin[g] = (Int32(greater(low, -63)) + 63 + block - 1) / block;
    w.full_end[g] = Int32(greater(lesser(high + 1, w.keys), 0)) / block;
  }
}

// The number of a block's tile. Every block begins with the tile of its own number.
__device__ inline Int32 number_in_round(const ForwardParams& p, Int32 round) {
  if (round > 0 && p.taken) return Int32(gridDim.x + atomicAdd(p.taken, 1u));
  return Int32(blockIdx.x) + round * Int32(gridDim.x);
}

}  // namespace tessera::sm90
