// SPDX-License-Identifier: Apache-2.0
// What a block of threads of the one-pass backward kernel does at a time: a block of keys, and the tiles of queries
// that see it. Found out beforehand by sm90/kernel/prepare.cuh, for all of them: there is no room for that arithmetic
// in the registers of those who only load and wait. Device code.
#pragma once

#include "gpu/kernel/common.cuh"
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

  // The work that is taken as number n. Not inlined: its search and the caller's rows would be more than the registers.
  __attribute__((noinline)) __device__ void find(const gpu::Question& x, const WorkOrder& order, Int64 n) {
    constexpr Int64 block = config.block_queries;
    gpu::QueryPlace place;
    keys = begin = end = 0;
    if (!gpu::key_place(x, one_pass_keys, place, number_of(x, work_at(order, n)))) return;
    const gpu::DeviceSequence& s = place.s;
    b = place.b, tensor_b = x.cu_seqlens_q.data ? 0 : place.b;
    kv = place.kv, head = place.h, heads = x.Hq / x.Hk;
    first = Int32(place.first), keys = Int32(s.nk), key_begin = Int32(s.k_begin);
    queries = Int32(s.nq), query_begin = Int32(s.q_begin);
    constexpr Int64 far = Int64(1) << 29;
    low = Int32(clamp(-s.mask.high, -far, far)), high = Int32(clamp(-s.mask.low, -far, far));
    const Range seen = visible_queries(s.mask, {first, lesser(Int64(first + one_pass_keys), s.nk)});
    begin = Int32(seen.begin / block);
    // Tiles that prepare.cuh does not find have no numbers, and perhaps those of others.
    const bool found = !x.cu_seqlens_q.data || gpu::finds_blocks(b, block, x.B, x.Nq, x.cu_seqlens_q);
    end = seen.empty() || !found ? begin : Int32(ceil_div(seen.end, block));
    tiles_begin = Int32(gpu::first_block(x.cu_seqlens_q, b, block, x.Nq));
  }

  // A work's number for gpu::key_place. Packed sequences are one: their blocks are those of all of them.
  __device__ static Int64 number_of(const gpu::Question& x, const WorkPlace& at) {
    if (x.cu_seqlens_k.data) return at.block * x.Hk + at.head;
    return (at.head / x.Hk * ceil_div(x.Nk, Int64(one_pass_keys)) + at.block) * x.Hk + at.head % x.Hk;
  }

  // Two kinds of nothing: a number without keys, and no more numbers.
  __device__ bool has_keys() const { return keys > 0; }
  __device__ bool is_end() const { return keys < 0; }
  __device__ void be_end() { keys = -1, begin = end = 0; }

  __device__ bool has_tiles() const { return begin < end; }
  __device__ Int32 block() const { return first / one_pass_keys; }
  // The tiles in which the 64 keys from `key` on see every query.
  struct Tiles {
    Int32 begin, end;
  };
  __device__ Tiles whole_tiles(Int32 key) const {
    const auto tiles_up_to = [](Int32 query) { return (query > 0 ? query : 0) / config.block_queries; };
    const Int32 whole_begin = tiles_up_to(key + 63 + low + config.block_queries - 1);
    const Int32 limit = key + high + 1 < queries ? key + high + 1 : queries;
    return {whole_begin, key + 64 <= keys ? tiles_up_to(limit) : whole_begin};
  }
  // Which of the blocks that add to a tile's sum this one is, in the order of their keys.
  __device__ UInt32 turn_at(Int32 tile) const {
    const Int32 key = tile * config.block_queries - high;  // the first that the tile's first query sees
    return UInt32(block() - (key > 0 ? key : 0) / one_pass_keys);
  }
};
static_assert(sizeof(OnePassWork<OnePassConfig{}>) == one_pass_work_bytes);

// The tiles of a block in the order in which everybody takes them: the last queries first. So blocks of keys that start
// one after another come to a tile one after another, whatever the mask. In order, a tile of all heads comes before the
// next tile: if it were a head before the next head, the blocks that see fewer queries would wait at every head for
// those that see more. In any order nobody waits, and one head at a time is less to keep in the L2 cache. In registers:
// shared memory is busy.
template <OnePassConfig config>
struct TileWalk {
  const Int32 begin, end, first_head, end_head;
  Int32 tile, head, left;  // left: tiles of all heads, with this one

  __device__ explicit TileWalk(const OnePassWork<config>& w) :
      begin(w.begin), end(w.end), first_head(w.head), end_head(w.head + w.heads), tile(end - 1), head(first_head),
      left(w.heads * (end - begin)) {}

  __device__ bool has_more() const { return left > 0; }
  __device__ void advance() {
    --left;
    if constexpr (config.ordered) {
      if (++head < end_head) return;
      head = first_head, --tile;
    } else {
      if (--tile >= begin) return;
      tile = end - 1, ++head;
    }
  }
  // Number of the tile among those of all heads and sequences.
  __device__ Int32 number(const OnePassMemory& memory, const OnePassWork<config>& w) const {
    return head * memory.tiles_per_head + w.tiles_begin + tile;
  }
};

// The same for those whose block has a tile's queries.
template <OnePassConfig config>
__device__ inline Int64 tile_number(const OnePassMemory& memory, const gpu::Question& x, const gpu::QueryPlace& place) {
  constexpr Int64 block = config.block_queries;
  return place.h * Int64(memory.tiles_per_head) + gpu::first_block(x.cu_seqlens_q, place.b, block, x.Nq) +
         place.first / block;
}

}  // namespace tessera::sm90
