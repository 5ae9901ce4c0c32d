// What a block of the Hopper kernels works on: a tile of queries of one head and the tiles of keys it sees. Producer
// and consumers ask the same function, so they cannot disagree about how many tiles there are. Device text.
#pragma once

#include "simt/kernel/common.cuh"
#include "sm90/config.hpp"
#include "sm90/params.hpp"
#include "sm90/ptx/tma.cuh"

namespace tessera::sm90 {

struct Work {
  Int32 b, h, kv;
  Int64 first;  // query
  simt::DeviceSequence s;
  Int32 begin, end;  // tiles of keys, at absolute positions
  __device__ bool empty() const { return begin >= end; }

  // Tensor copies count tokens from the beginning of a padded sequence, or of all packed ones.
  __device__ TilePlace queries(const ForwardParams& p, int skip) const {
    return {Int32(s.q_begin + first) + skip, h, p.call.x.cu_seqlens_q.data ? 0 : b};
  }
  __device__ TilePlace keys(const ForwardParams& p, Int32 first_key) const {
    return {Int32(s.k_begin) + first_key, kv, p.call.x.cu_seqlens_q.data ? 0 : b};
  }
};

template <Config config>
__device__ inline Work work_of(const ForwardParams& p, Int32 number) {
  const simt::Question& x = p.call.x;
  const Int32 section_tiles = p.section * p.tiles_per_head;
  const Int32 section = number / section_tiles, rest = number % section_tiles;
  const Int32 head = section * p.section + rest % p.section;
  const Int32 tile = p.tiles_per_head - 1 - rest / p.section;  // the last see the most, when causal
  Work w;
  if (x.cu_seqlens_q.data) {
    const simt::BlockPlace at = simt::place_of(tile, rows_of(config), x.B, x.Nq, x.cu_seqlens_q);
    w.b = at.b, w.h = head, w.first = at.first;
  } else {
    w.b = head / x.Hq, w.h = head % x.Hq, w.first = Int64(tile) * rows_of(config);
  }
  w.kv = w.h / (x.Hq / x.Hk);
  w.s = simt::sequence_of(x, w.b);
  const Range queries{w.first, lesser(w.first + rows_of(config), w.s.nq)};
  const Range keys = visible_keys(w.s.mask, queries);
  w.begin = Int32(keys.begin / config.block_keys);
  w.end = keys.empty() ? w.begin : Int32(ceil_div(keys.end, config.block_keys));
  return w;
}

// The band in terms of one warpgroup's 64 queries: which tiles it does not cut, and what it leaves of the others. In 32
// bits, as tensor copies count tokens.
template <Config config>
struct Band {
  Int32 low, high;  // of a key that query 0 of the warpgroup sees
  Int32 keys;
  Int32 full_begin, full_end;

  __device__ Band(const Work& w, Int64 first_query) : keys(Int32(w.s.nk)) {
    constexpr Int32 block = config.block_keys;
    constexpr Int64 far = Int64(1) << 30;
    low = Int32(clamp(w.s.mask.low + first_query, -far, far));
    high = Int32(clamp(w.s.mask.high + first_query, -far, far));
    full_begin = Int32(clamp((greater(low, -63) + 63 + block - 1) / block, w.begin, w.end));
    full_end = Int32(clamp(greater(lesser(high + 1, keys), 0) / block, w.begin, w.end));
  }
  __device__ bool cuts(Int32 tile) const { return tile < full_begin || tile >= full_end; }
};

}  // namespace tessera::sm90
