// SPDX-License-Identifier: Apache-2.0
// Which rows and keys a work item of the `decode` kernels has: lengths are read on the device, so that a captured graph
// follows them. A warp finds it out, from the queue or by its number alone, and describes it in shared memory. Device
// code.
#pragma once

#include "decode/config.hpp"
#include "decode/params.hpp"
#include "gpu/kernel/pages.cuh"

namespace tessera::decode {

using gpu::PagedSequence;

// A sequence of more queries than this plan takes has none here: they are another launch's.
__device__ inline PagedSequence sequence_of(const Params& p, Int32 b) {
  PagedSequence out = gpu::paged_lengths(p.call.x, p.pages, p.most, b);
  if (p.plain)
    out.s.mask.keys = out.s.nk;
  else
    gpu::set_band(p.call.x, out.s);
  if (out.s.nq > p.taken_queries) out.s.nq = 0;
  return out;
}

__device__ inline RowTile rows_of_tile(const Params& p, const gpu::DeviceSequence& s, Int32 tile) {
  RowTile t{};
  t.first = tile * p.rows;
  t.count = Int32(clamp(s.nq * p.group - t.first, 0, p.rows));
  if (t.count == 0) return t;
  if (p.plain) {
    t.keys = t.whole = {0, s.nk};
    return t;
  }
  const Int64 first = t.first / p.group, last = (t.first + t.count - 1) / p.group;
  t.keys = visible_keys(s.mask, {first, last + 1});
  t.whole = {visible_keys(s.mask, {last, last + 1}).begin, visible_keys(s.mask, {first, first + 1}).end};
  // A tree's keys are the last ones. Rows with places of their own may see any key: what they do not see changes
  // nothing, it only takes time.
  if (p.draft.tree) t.keys.end = s.nk, t.whole.end = lesser(t.whole.end, s.nk - s.nq);
  if (p.draft.positions) t.keys = {0, s.nk}, t.whole = {};
  if (t.keys.empty()) t.keys = {};
  return t;
}

// What is known of one row.
struct alignas(16) Column {
  Int64 origin;      // the key on the row's diagonal, which ALiBi measures distances from
  Int64 tree;        // its first word of the tree mask
  Int32 begin, end;  // keys that it sees, of those before the tree's
  Int32 tree_end;    // keys that it may see of the tree's
  float slope;
  float factor;  // of its scores: what Q was divided by on its way to f16, a power of two
};
static_assert(sizeof(Column) == column_bytes);

struct Work {
  Group group;
  Item item;
  UInt32 number;  // of the item to be taken
  UInt32 items;   // without a queue: how many there are
  Int32 level;
  bool exists;       // false: there are no more items
  bool last_come;    // of the item's family
  Nodes leaves;      // of the item
  Int32 begin, end;  // keys of the item: of those leaves that some row sees
};
static_assert(sizeof(Work) <= work_bytes);

// A tile of rows of sequence b, by one thread. False: it has no rows.
__device__ inline bool look_at(const Params& p, Int32 b, Int32 tile, Group& g) {
  const PagedSequence of = sequence_of(p, b);
  g.b = b, g.tile = tile;
  g.rows = rows_of_tile(p, of.s, tile);
  g.shift = of.s.shift, g.mask = of.s.mask;
  g.q_begin = of.s.q_begin;
  g.k_first = p.pages.k.entries ? of.leftpad : of.s.k_begin;
  g.k_entry = gpu::first_entry(p.pages, of, p.pages.k, b);
  g.v_entry = gpu::first_entry(p.pages, of, p.pages.v, b);
  g.tree_begin = Int32(of.s.nk - of.s.nq);
  return g.rows.count > 0;
}

// What follows from the group, the item and the level.
__device__ inline void find_keys(Work& w) {
  const Range& keys = w.group.rows.keys;
  w.leaves = leaves_under(leaves_of(keys), w.item.node, w.level);
  w.begin = Int32(greater(keys.begin, Int64(w.leaves.first) * leaf_keys));
  w.end = Int32(lesser(keys.end, Int64(w.leaves.end) * leaf_keys));
}

// Item w.number of the queue, by the lanes of a warp. What lies behind the last item is read, but not used.
__device__ inline void take_work(const Params& p, Work& w) {
  const int lane = threadIdx.x % 32;
  const UInt32 number = w.number;
  const Queue queue = *p.memory.queue;
  const bool exists = number < UInt32(queue.items);
  const Item item = p.memory.items[number < UInt32(p.memory.most_items) ? number : 0];
  if (exists && lane < group_bytes / 16)
    reinterpret_cast<uint4*>(&w.group)[lane] = reinterpret_cast<const uint4*>(p.memory.groups + item.group)[lane];
  __syncwarp();
  if (lane != 0) return;
  w.exists = exists;
  if (!exists) return;
  w.item = item, w.level = queue.level;
  find_keys(w);
}

// Item w.number where there is no queue, by the lanes of a warp: every block looks at all groups, which are few, and
// chooses the same level. Items count by groups, nodes and heads, heads fastest: their keys lie side by side.
__device__ inline void find_work(const Params& p, Work& w) {
  constexpr unsigned all = 0xffffffffu;
  const int lane = threadIdx.x % 32;
  const Int32 groups = p.groups.count, heads = Int32(p.call.x.Hk);
  Group group;  // the lane's
  Nodes leaves{};
  if (lane < groups && look_at(p, lane / p.tiles, lane % p.tiles, group)) leaves = leaves_of(group.rows.keys);

  // A lane counts for its level.
  const int level_here = lane < p.levels ? lane : p.levels;
  Int32 items = 0, slots = 0, longest = 0;
#pragma unroll 1
  for (Int32 n = 0; n < groups; ++n) {
    const Nodes of{__shfl_sync(all, leaves.first, n), __shfl_sync(all, leaves.end, n)};
    if (of.count() == 0) continue;
    const Int32 count = of.above(level_here).count() * heads;
    items += count, slots += count > heads ? count : 0, longest = of.count() > longest ? of.count() : longest;
  }
  const bool able = lane <= p.levels && slots <= p.memory.most_slots;
  const UInt32 cost = able ? cost_of_rounds(UInt32(items), UInt32(longest), lane, gridDim.x) : UInt32(1) << 25;
  UInt32 least = cost;
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const UInt32 other = __shfl_xor_sync(all, least, distance);
    least = other < least ? other : least;
  }
  const int level = 31 - __clz(int(__ballot_sync(all, able && is_near(cost, least))));

  // The lane whose group has the item tells of it.
  const Nodes nodes = leaves.count() > 0 ? leaves.above(level) : Nodes{};
  const Int32 of_lane = nodes.count() * heads, number = Int32(w.number);
  Int32 first = 0, slot = 0;  // of the lane's items
#pragma unroll 1
  for (Int32 n = 0; n + 1 < groups; ++n) {
    const Int32 of = __shfl_sync(all, of_lane, n);
    if (n < lane) first += of, slot += of > heads ? of : 0;
  }
  const bool has_it = number >= first && number < first + of_lane;
  const unsigned who = __ballot_sync(all, has_it);
  UInt32 all_items = __shfl_sync(all, UInt32(items), level);
  if (who == 0 && lane == 0) w.exists = false;
  if (!has_it) return;
  const Int32 rest = number - first, kv = rest % heads, count = nodes.count();
  w.exists = true, w.level = level, w.group = group, w.items = all_items;
  w.item = {.b = group.b,
            .kv = kv,
            .tile = group.tile,
            .node = nodes.first + rest / heads,
            .siblings = nodes,
            .slot = count > 1 ? slot + kv * count : -1,
            .group = lane};
  find_keys(w);
}

// The block's node where each cluster has a group, by one thread. All nodes of it lie under one that is as many levels
// higher as `blocks` takes: so a cluster merges them all.
__device__ inline void find_node(const Params& p, Work& w, int blocks) {
  const Int32 cluster = blockIdx.x / blocks, heads = Int32(p.call.x.Hk), kv = cluster % heads, group = cluster / heads;
  const Int32 b = group / p.tiles, tile = group % p.tiles;
  const bool is_first = kv == 0 && tile == 0 && blockIdx.x % blocks == 0;
  if (is_first && p.pages.status && gpu::is_cut(p.call.x, p.pages, p.most, b))
    atomicOr(p.pages.status, gpu::beyond_bounds);
  w.exists = look_at(p, b, tile, w.group);
  if (!w.exists) return;
  const Nodes leaves = leaves_of(w.group.rows.keys);
  const int levels = levels_above(blocks);
  w.level = 0;
  while (leaves.above(w.level + levels).count() > 1) ++w.level;
  const Nodes nodes = leaves.above(w.level);
  w.item = {.b = b, .kv = kv, .tile = tile, .node = nodes.first + Int32(blockIdx.x % blocks), .siblings = nodes};
  if (w.item.node < nodes.end) find_keys(w);
}

// Row r of the item's.
__device__ inline Column column_of(const Params& p, const Work& w, int r) {
  const Group& g = w.group;
  if (r >= g.rows.count) return {};
  if (p.plain) return {.end = Int32(g.mask.keys), .factor = 1};
  const gpu::Question& x = p.call.x;
  const Int32 row = g.rows.first + r, i = row / p.group, h = w.item.kv * p.group + row % p.group;
  const Int64 query = g.q_begin + i;
  Column out{.origin = i + g.shift, .factor = 1};
  Range keys = visible_keys(g.mask, {i, i + 1});
  if (p.draft.positions || p.draft.tree) {
    if (p.draft.positions)
      out.origin = bounded(p.draft.positions[w.item.b * p.draft.position_batch + query * p.draft.position_row] +
                           bounded(bounded(x.row0) - bounded(x.col0)));
    const Int64 nk = g.mask.keys,
                right = x.window_right < 0 ? nk : clamp(out.origin + bounded(x.window_right) + 1, 0, nk);
    keys.begin = x.window_left < 0 ? 0 : clamp(out.origin - bounded(x.window_left), 0, nk);
    keys.end = x.causal ? lesser(right, clamp(out.origin + 1, 0, nk)) : right;
    out.tree_end = Int32(right), out.tree = w.item.b * p.draft.tree_batch + query * p.draft.tree_row;
  }
  out.begin = Int32(keys.begin), out.end = Int32(keys.end);
  out.slope = x.slopes ? x.slopes[w.item.b * x.slope_batch + h * x.slope_head] : 0;
  return out;
}

}  // namespace tessera::decode
