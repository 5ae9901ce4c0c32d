// SPDX-License-Identifier: Apache-2.0
// What a block of the `mma` one-pass backward kernel works on: keys of one head, the tiles of queries that see them, of
// all heads of the group, and its turn at each tile's sum of dQ. One thread describes it in shared memory. Device code.
#pragma once

#include "mma/kernel/backward_work.cuh"
#include "mma/one_pass_config.hpp"

namespace tessera::mma {

struct OnePassWork : BackwardWork {
  Int32 tiles_begin;  // number of the sequence's first tile of queries among those of a head

  // A tile of queries. The last ones of a head come first: blocks of keys that start one after another come to a tile
  // one after another, whatever the mask.
  struct Place {
    Int32 head, n;
  };
  __device__ Place first_place() const { return {head, end - 1}; }
  __device__ Place after(Place at) const {
    return at.n > begin ? Place{at.head, at.n - 1} : Place{at.head + 1, end - 1};
  }
  __device__ bool exists(Place at) const { return at.head < head + heads; }
  Place places[2];  // the tile in work, and the next

  // If config.ordered: of tile n of a head at n % turn_tiles, what its additions have to do.
  enum class Turn : UInt16 { stores, adds, waits };
  Turn turns[most_turn_tiles];

  // Number of a tile among those of all heads and sequences.
  __device__ Int32 tile_number(const OnePassMemory& memory, Place at) const {
    return at.head * memory.tiles_per_head + tiles_begin + at.n;
  }
};
static_assert(sizeof(OnePassWork) <= one_pass_work_bytes);

// Work `number`, which is counted as the blocks take them. The blocks of a head are counted in the order of their keys,
// so whoever waits for its turn waits for a work that was taken before.
template <OnePassConfig config>
__device__ inline void describe_one_pass(const gpu::Question& x, Int32 blocks_per_head, Int32 section, Int32 number,
                                         OnePassWork& w) {
  constexpr Int64 queries = config.block_queries;
  describe_work<Side::keys, keys_of(config), config.block_queries>(x, blocks_per_head, section, number, w);
  w.tiles_begin = 0;
  if (w.first >= w.rows) return;
  w.places[0] = w.first_place();
  w.tiles_begin = Int32(gpu::first_block(x.cu_seqlens_q, w.b, queries, x.Nq));
  // Tiles that mma/kernel/finish.cuh does not find have no sums, and perhaps those of others.
  if (x.cu_seqlens_q.data && !gpu::finds_blocks(w.b, queries, x.B, x.Nq, x.cu_seqlens_q)) w.end = w.begin;
}

// Which of the blocks that add to tile n's sum this one is, in the order of their keys.
template <OnePassConfig config>
__device__ inline UInt32 turn_at(const BackwardWork& w, Int32 n) {
  const Int32 key = n * config.block_queries - w.high + w.first;  // the first that the tile's first query sees
  return UInt32(w.first / keys_of(config) - (key > 0 ? key : 0) / keys_of(config));
}

}  // namespace tessera::mma
