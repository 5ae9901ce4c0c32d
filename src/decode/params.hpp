// SPDX-License-Identifier: Apache-2.0
// What the `decode` kernels are given besides what every GPU kernel is given, and what the schedule leaves for the
// attention kernel in the workspace. Shared by host and device code.
// Included by src/decode and the tests; docs/gpu_kernels.md, "decode".
#pragma once

#include "decode/tree.hpp"
#include "gpu/pages.hpp"

namespace tessera::decode {

// Rows of a tile: row r is head r % group of query r / group of the sequence.
struct RowTile {
  Int32 first, count;
  Range keys;   // that some of them see
  Range whole;  // that all of them see
};

// A tile of rows of a sequence: what all of its work items have in common. The schedule reads lengths and asks masks
// once, and leaves it here.
struct alignas(16) Group {
  Int32 b, tile;
  RowTile rows;
  Int64 shift;  // of the diagonal
  BandMask mask;
  Int64 q_begin;  // of the sequence
  Int64 k_first;  // where the sequence's keys begin: a token; paged: the left padding
  Int64 k_entry;  // paged: the sequence's first entry of each table
  Int64 v_entry;
  Int32 tree_begin;  // the key of a tree's bit 0
};
inline constexpr int group_bytes = 128;
static_assert(sizeof(Group) == group_bytes);

// A work item: a node of the merge tree, of one KV head of a group.
struct alignas(16) Item {
  Int32 b, kv, tile;
  Int32 node;
  Nodes siblings;  // of it, itself included: with one there is nothing to merge
  Int32 slot;      // of the first sibling's state; -1: none has any
  Int32 group;     // its number
};
static_assert(sizeof(Item) == 32);

struct alignas(16) Queue {
  Int32 level;  // of all nodes
  Int32 items;
  UInt32 taken;  // of those behind the first of each block
  Int32 unused;
};

struct Memory {
  Queue* queue;    // null, as groups and items: blocks find their work items themselves
  Group* groups;   // [groups.count]
  Item* items;     // [most_items]
  UInt32* counts;  // [climbs][most_slots]: siblings that have arrived, by the slot of their family's first
  float* stacks;   // [blocks][stack_levels] states
  float* states;   // [most_slots] states
  Int32 most_items, most_slots, climbs, stack_levels;
};

// What rows of queries have of their own; data null: nothing. Packed: batch = 0.
struct Draft {
  const Int32* tree;  // bits of query i: word t / 32 of its row
  Int64 tree_batch, tree_row, tree_word;
  Int32 tree_bits;  // of a row
  const Int32* positions;
  Int64 position_batch, position_row;
};

// Tiles of rows of all sequences, for each KV head: what the schedule goes through. Each sequence has `tiles`; or,
// where it is fewer, those of packed tokens are numbered, by blocks of queries whose rows are whole tiles.
struct Groups {
  Int32 count;
  Int32 block_queries, block_tiles;  // 0: numbered by sequences
};

struct Params {
  gpu::ForwardParams call;  // where there are pages, the batch stride of k and v is that of pages
  gpu::TokenRef qv;         // data null: none
  gpu::PageTables pages;
  gpu::ScaleRef k_scale, v_scale;
  Int64 k_scale_group, v_scale_group;  // from the scale of 128 dims to that of the next
  Draft draft;
  Memory memory;
  gpu::LengthBounds most;
  Int32 levels;       // of the merge tree of most.keys keys
  Int32 D, Dv;        // of the tensors
  Int32 group;        // heads of a KV head
  Int32 rows, tiles;  // of a work item; of a sequence, at most
  Groups groups;
  Int32 taken_queries;  // of a sequence; those with more are another launch's
  Int32 workers;        // blocks that run at the same time
  bool plain;           // every row sees every key of its sequence, and none has a place: nobody asks masks
};

// --- the choice of the level

// What it would mean to cut all sequences at one level.
struct LevelCount {
  Int64 items = 0, full = 0, slots = 0;  // full: with all of their leaves; slots: states to keep
};
struct Load {
  Int64 leaves = 0, longest = 0;  // of all items together, of the longest sequence
};

// Families of families that are merged one after another, each of which takes about as long as a leaf.
constexpr int climbs_of(Int64 longest, int level) {
  const int above = levels_above(longest) - level;
  return above > 0 ? (above + family_levels - 1) / family_levels : 0;
}
// How long the slowest worker works, in leaves, at most: rounds of equal items, or a fair share and one item more; and
// then it climbs.
constexpr Int64 cost_of(const LevelCount& count, const Load& load, int level, Int64 workers) {
  const Int64 item = lesser(Int64(1) << level, load.longest);
  return lesser(ceil_div(count.items, workers) * item, ceil_div(load.leaves, workers) + item) +
         climbs_of(load.longest, level);
}
// The same where blocks do not share a queue: rounds alone. Of few groups, so 32 bits hold it (most_direct_groups).
constexpr UInt32 cost_of_rounds(UInt32 items, UInt32 longest, int level, UInt32 workers) {
  const UInt32 item = UInt32(1) << level < longest ? UInt32(1) << level : longest;
  return (items + workers - 1) / workers * item + UInt32(climbs_of(longest, level));
}
// Of all levels the highest whose cost is within 3 % of the least is taken: fewer items, fewer merges. At the highest
// of all every sequence is one item, which keeps no state.
template <class Cost>
constexpr bool is_near(Cost cost, Cost least) {
  return cost * 100 <= least * 103;
}
// Groups whose blocks may find their work items themselves: a lane of a warp for each.
inline constexpr int most_direct_groups = 32;

}  // namespace tessera::decode
