// What a block of threads of the one-pass backward kernel does at a time: a block of keys, and the tiles of queries
// that see it. Found out beforehand by sm90/kernel/prepare.cuh, for all of them: there is no room for that arithmetic
// in the registers of those who only load and wait. Device text.
#pragma once

#include "simt/kernel/common.cuh"
#include "sm90/one_pass_config.hpp"
#include "sm90/params.hpp"

namespace tessera::sm90 {

// Tokens are counted in 32 bits, as tensor copies count them.
template <OnePassConfig config>
struct alignas(16) OnePassWork {
  Int32 b, tensor_b;              // tensor_b: where tensor copies count sequences; all packed ones are one
  Int32 kv, head, heads;          // the head of K and V, its first query head, and how many
  Int32 first, keys, key_begin;   // the block's first key, of so many in its sequence, which begins there
  Int32 queries, query_begin;     // of the sequence
  Int32 low, high;                // key j sees queries low + j to high + j
  Int32 begin, end, tiles_begin;  // tiles of queries, at absolute positions; number of the sequence's first tile

  // The work that is taken as number n of `blocks`. In order, each sequence's last keys come first: under a causal mask
  // they have the fewest tiles, and every other block comes to a tile later than the blocks behind it; nobody waits for
  // another if they only start in this order. Otherwise the longest come first, which leaves least to wait for at the
  // end.
  __device__ void find(const simt::Question& x, Int64 n, Int64 blocks) {
    constexpr Int64 block = config.block_queries;
    simt::QueryPlace place;
    keys = begin = end = 0;
    if (!simt::key_place(x, one_pass_keys, place, config.ordered ? blocks - 1 - n : n)) return;
    const simt::DeviceSequence& s = place.s;
    b = place.b, tensor_b = x.cu_seqlens_q.data ? 0 : place.b;
    kv = place.kv, head = place.h, heads = x.Hq / x.Hk;
    first = Int32(place.first), keys = Int32(s.nk), key_begin = Int32(s.k_begin);
    queries = Int32(s.nq), query_begin = Int32(s.q_begin);
    constexpr Int64 far = Int64(1) << 29;
    low = Int32(clamp(-s.mask.high, -far, far)), high = Int32(clamp(-s.mask.low, -far, far));
    const Range seen = visible_queries(s.mask, {first, lesser(Int64(first + one_pass_keys), s.nk)});
    begin = Int32(seen.begin / block);
    end = seen.empty() ? begin : Int32(ceil_div(seen.end, block));
    tiles_begin = Int32(simt::first_block(x.cu_seqlens_q, b, block, x.Nq));
  }

  // Two kinds of nothing: a number without keys, and no more numbers.
  __device__ bool has_keys() const { return keys > 0; }
  __device__ bool is_end() const { return keys < 0; }
  __device__ void be_end() { keys = -1, begin = end = 0; }

  __device__ bool has_tiles() const { return begin < end; }
  __device__ Int32 block() const { return first / one_pass_keys; }
  // Which of the blocks that add to a tile's sum this one is, from the last keys to the first.
  __device__ UInt32 turn_at(Int32 tile) const {
    const Int64 query = lesser(Int64(tile + 1) * config.block_queries, queries) - 1;  // the tile's last one
    return UInt32(lesser(query - low, keys - 1)) / one_pass_keys - UInt32(block());
  }
};
static_assert(sizeof(OnePassWork<OnePassConfig{}>) == one_pass_work_bytes);

// The tiles of a block in the order in which everybody takes them.
template <OnePassConfig config>
struct TileWalk {
  const OnePassWork<config>& w;
  Int32 tile = w.begin, head = w.has_tiles() ? 0 : w.heads;

  __device__ bool has_more() const { return head < w.heads; }
  __device__ void advance() {
    if (++tile < w.end) return;
    tile = w.begin, ++head;
  }
  // Number of the tile among those of all heads and sequences.
  __device__ Int32 number(const OnePassMemory& memory) const {
    return (w.head + head) * memory.tiles_per_head + w.tiles_begin + tile;
  }
};

// The same for those whose block has a tile's queries.
template <OnePassConfig config>
__device__ inline Int64 tile_number(const OnePassMemory& memory, const simt::Question& x,
                                    const simt::QueryPlace& place) {
  constexpr Int64 block = config.block_queries;
  return place.h * Int64(memory.tiles_per_head) + simt::first_block(x.cu_seqlens_q, place.b, block, x.Nq) +
         place.first / block;
}

}  // namespace tessera::sm90
