// SPDX-License-Identifier: Apache-2.0
// Tile sizes of the CPU kernels, the same for every instruction set, type and problem: a sequence's bits depend on its
// own numbers only, and a tile's place in a sequence on nothing but its index. See docs/cpu_kernels.md.
#pragma once

#include "math/types.hpp"

namespace tessera::cpu {

// Queries lie along SIMD lanes: 64 fill four 512-bit registers, the width of one product's register block.
inline constexpr Int64 block_q = 64;
// Keys lie along rows: 192 is a multiple of the register block's 6 rows, and two such f32 tiles (96 KiB) with the
// operands stay in a 512 KiB L2 cache for D up to 128.
inline constexpr Int64 block_k = 192;

// Neighbouring blocks of queries that one forward task takes, at most: they share what it loads of K and V. Any number
// gives the same bits.
inline constexpr Int64 forward_blocks = 8;

// The backward pass splits a sequence's keys into groups, with a dQ image per group that is summed in order at the end.
// More groups: more parallelism, more memory. Counted from the sequence's own length; parts of a problem have one.
inline constexpr Int64 max_groups = 4;
inline constexpr Int64 min_blocks_per_group = 2;
// A group's keys are split into spans of so many blocks, one task each; the blocks of a span share what it loads of Q
// and dO. The spans of a group add to its image in order. Any number gives the same bits.
inline constexpr Int64 key_blocks_beside = 2;

// Sequences with few queries: rows (queries of several heads) that share a pass over K and V, keys to a step, passes
// side by side, and the chunks into which the keys that they see are split, by their number alone.
inline constexpr Int64 decode_queries = 8, decode_rows = 16, decode_step = 32, decode_jobs = 8;
inline constexpr Int64 least_chunk = 256, max_chunks = 32;
constexpr Int64 decode_chunk(Int64 keys) {
  return greater(least_chunk, round_up(ceil_div(keys, max_chunks), decode_step));
}
constexpr Int64 most_chunks(Int64 keys) { return clamp(ceil_div(keys, least_chunk), 1, max_chunks); }

constexpr Int64 key_blocks(Int64 keys) { return ceil_div(keys, block_k); }
constexpr Int64 query_blocks(Int64 queries) { return ceil_div(queries, block_q); }
constexpr Int64 key_groups(Int64 keys) { return clamp(key_blocks(keys) / min_blocks_per_group, 1, max_groups); }
// First block of group g of so many; group g holds [group_begin(g), group_begin(g + 1)).
constexpr Int64 group_begin(Int64 keys, Int64 groups, Int64 g) { return key_blocks(keys) * g / groups; }
// Spans of the largest group.
constexpr Int64 most_spans(Int64 keys, Int64 groups) {
  return ceil_div(ceil_div(key_blocks(keys), groups), key_blocks_beside);
}

}  // namespace tessera::cpu
