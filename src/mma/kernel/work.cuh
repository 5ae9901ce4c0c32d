// SPDX-License-Identifier: Apache-2.0
// What a block of the `mma` kernels works on: a tile of queries of one head, and the tiles of keys that it sees. One
// thread finds it out and describes it in shared memory: kept in registers, it would cost all threads. Device code.
#pragma once

#include "gpu/kernel/pages.cuh"
#include "mma/config.hpp"
#include "mma/params.hpp"

namespace tessera::mma {

struct Work {
  Int64 q_begin, k_begin;  // of the sequence
  Int64 shift;             // of the diagonal: what ALiBi measures distances from
  Int32 b, h, kv;
  Int32 first, queries, keys;  // the tile's first query; of so many queries and keys in its sequence
  Int32 low, high;             // of the keys that the tile's query 0 sees; those of query i are i more
  Int32 begin, end;            // tiles of keys

  // The keys that queries first_row to end_row - 1 of the tile see, as visible_keys says; 32 bits are quicker.
  struct Keys {
    Int32 begin, end;
    __device__ bool empty() const { return begin >= end; }
  };
  __device__ Keys seen_by(Int32 first_row, Int32 end_row) const {
    const auto held = [&](Int32 key) { return key < 0 ? 0 : key < keys ? key : keys; };
    const Int32 rows = queries - first, last_row = end_row < rows ? end_row : rows;
    return first_row < last_row ? Keys{held(first_row + low), held(last_row + high)} : Keys{0, 0};
  }
};
static_assert(sizeof(Work) <= work_bytes);

// Where the keys of a block are listed, if they lie in pages.
struct alignas(16) Listing {
  Int64 k_entry, v_entry;  // the sequence's first entry of each table
  Int32 leftpad;
  Int32 begin, end;        // keys that some query of the tile sees: of others, entries are not read
  float k_scale, v_scale;  // of the block's head
};
static_assert(sizeof(Listing) == listing_bytes);

// A warp's share of it, in tiles of keys: those that some of its queries see, and those that the band leaves whole for
// all of them.
struct alignas(share_bytes) Share {
  Int32 begin, end, whole_begin, whole_end;

  __device__ bool sees(Int32 tile) const { return begin <= tile && tile < end; }
  __device__ bool cuts(Int32 tile) const { return tile < whole_begin || tile >= whole_end; }
};
static_assert(sizeof(Share) == share_bytes);

template <Config config>
__device__ inline void describe_share(const Work& w, int warp, Share& share) {
  constexpr int rows = 16 * config.row_tiles, keys = config.block_keys;
  const Work::Keys own = w.seen_by(rows * warp, rows * warp + rows);
  share.begin = own.empty() ? w.end : own.begin / keys;
  share.end = own.empty() ? w.end : (own.end + keys - 1) / keys;
  const Int32 low = w.low + rows * warp + rows - 1, high = w.high + rows * warp + 1;
  share.whole_begin = low < 0 ? 0 : (low + keys - 1) / keys;
  share.whole_end = (high < 0 ? 0 : high < w.keys ? high : w.keys) / keys;
}

template <Config config>
using Params = typename Chosen<config.paged, PagedParams, ForwardParams>::Type;

// The sequence of block `number`.
template <Config config>
__device__ inline gpu::DeviceSequence sequence_of(const Params<config>& p, Int32 number, Int32 b, Listing& listing) {
  const gpu::Question& x = p.call.x;
  if constexpr (config.paged) {
    gpu::PagedSequence of = gpu::paged_sequence(x, p.pages, p.most, b);
    if (of.s.nq < p.least_queries) of.s.nq = 0;
    listing.k_entry = gpu::first_entry(p.pages, of, p.pages.k, b);
    listing.v_entry = gpu::first_entry(p.pages, of, p.pages.v, b);
    listing.leftpad = Int32(of.leftpad);
    // There are at least as many blocks as sequences: each looks at one.
    if (p.pages.status && number < x.B && gpu::is_cut(x, p.pages, p.most, number))
      atomicOr(p.pages.status, gpu::beyond_bounds);
    return of.s;
  } else {
    return gpu::sequence_of(x, b);
  }
}

// Block `number`. Heads are worked on in sections, and in a section the last queries first, which see the most keys
// when causal.
template <Config config>
__device__ inline void describe_work(const Params<config>& p, Int32 number, Work& w, Listing& listing) {
  const gpu::Question& x = p.call.x;
  const Int32 section_tiles = p.section * p.tiles_per_head;
  const Int32 section = number / section_tiles, rest = number % section_tiles;
  const Int32 head = section * p.section + rest % p.section, tile = p.tiles_per_head - 1 - rest / p.section;
  if (x.cu_seqlens_q.data) {
    const gpu::BlockPlace at = gpu::place_of(tile, rows_of(config), x.B, x.Nq, x.cu_seqlens_q);
    w.b = at.b, w.h = head, w.first = Int32(at.first);
  } else {
    w.b = head / x.Hq, w.h = head % x.Hq, w.first = tile * rows_of(config);
  }
  w.kv = w.h / (x.Hq / x.Hk);
  Int64 low = p.low, high = p.high;
  w.queries = p.queries, w.keys = p.keys, w.shift = p.shift, w.q_begin = w.k_begin = 0;
  if (config.paged || !p.even) {
    const gpu::DeviceSequence s = sequence_of<config>(p, number, w.b, listing);
    w.queries = Int32(s.nq), w.keys = Int32(s.nk), w.shift = s.shift, w.q_begin = s.q_begin, w.k_begin = s.k_begin;
    low = s.mask.low, high = s.mask.high;
  }
  constexpr Int64 far = Int64(1) << 30;
  w.low = Int32(clamp(low + w.first, -far, far)), w.high = Int32(clamp(high + w.first, -far, far));
  const Work::Keys seen = w.seen_by(0, rows_of(config));
  if constexpr (config.scaled) {
    listing.k_scale = p.k_scale.data ? *p.k_scale.at(w.b, 0, 0, w.kv) : 1;
    listing.v_scale = p.v_scale.data ? *p.v_scale.at(w.b, 0, 0, w.kv) : 1;
  }
  if constexpr (config.paged) listing.begin = seen.begin, listing.end = seen.end;
  w.begin = seen.begin / config.block_keys;
  w.end = seen.empty() ? w.begin : (seen.end + config.block_keys - 1) / config.block_keys;
}

}  // namespace tessera::mma
