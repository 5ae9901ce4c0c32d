// SPDX-License-Identifier: Apache-2.0
// Which rows and keys a work item of the `decode` kernels has: lengths are read on the device, so that a captured graph
// follows them. One thread finds it out and describes it in shared memory. Device code.
#pragma once

#include "decode/config.hpp"
#include "decode/params.hpp"
#include "gpu/kernel/pages.cuh"

namespace tessera::decode {

using gpu::PagedSequence;

// A sequence of more queries than this plan takes has none here: they are another launch's.
__device__ inline PagedSequence sequence_of(const Params& p, Int32 b) {
  PagedSequence out = gpu::paged_sequence(p.call.x, p.pages, p.most, b);
  if (out.s.nq > p.taken_queries) out.s.nq = 0;
  return out;
}

// Rows of a tile: row r is head r % group of query r / group of the sequence.
struct RowTile {
  Int32 first, count;
  Range keys;   // that some of them see
  Range whole;  // that all of them see
};

__device__ inline RowTile rows_of_tile(const Params& p, const gpu::DeviceSequence& s, Int32 tile) {
  RowTile t{};
  t.first = tile * p.rows;
  t.count = Int32(clamp(s.nq * p.group - t.first, 0, p.rows));
  if (t.count == 0) return t;
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
  Item item;
  Int32 level;
  bool exists;     // false: the queue is empty
  bool last_come;  // of the item's family
  RowTile rows;
  Nodes leaves;      // of the item
  Int32 begin, end;  // keys of the item: of those leaves that some row sees
  Int64 q_begin;     // of the sequence
  Int64 k_first;     // where the sequence's keys begin: a token; paged: the left padding
  Int64 k_entry;     // paged: the sequence's first entry of each table
  Int64 v_entry;
  Int32 tree_begin;  // the key of a tree's bit 0
};
static_assert(sizeof(Work) <= work_bytes);

// The next item of the queue.
__device__ inline void take_work(const Params& p, Work& w) {
  const Queue& queue = *p.memory.queue;
  const UInt32 number = atomicAdd(&p.memory.queue->taken, 1u);
  w.exists = number < UInt32(queue.items);
  if (!w.exists) return;
  w.item = p.memory.items[number], w.level = queue.level;
  const PagedSequence of = sequence_of(p, w.item.b);
  w.rows = rows_of_tile(p, of.s, w.item.tile);
  w.leaves = leaves_under(leaves_of(w.rows.keys), w.item.node, w.level);
  w.begin = Int32(greater(w.rows.keys.begin, Int64(w.leaves.first) * leaf_keys));
  w.end = Int32(lesser(w.rows.keys.end, Int64(w.leaves.end) * leaf_keys));
  w.q_begin = of.s.q_begin;
  w.k_first = p.pages.k.entries ? of.leftpad : of.s.k_begin;
  w.k_entry = gpu::first_entry(p.pages, of, p.pages.k, w.item.b);
  w.v_entry = gpu::first_entry(p.pages, of, p.pages.v, w.item.b);
  w.tree_begin = Int32(of.s.nk - of.s.nq);
}

// Row r of the item's.
__device__ inline Column column_of(const Params& p, const Work& w, int r) {
  if (r >= w.rows.count) return {};
  const gpu::Question& x = p.call.x;
  const PagedSequence of = sequence_of(p, w.item.b);
  const Int32 row = w.rows.first + r, i = row / p.group, h = w.item.kv * p.group + row % p.group;
  const Int64 query = w.q_begin + i;
  Column out{.origin = i + of.s.shift, .factor = 1};
  Range keys = visible_keys(of.s.mask, {i, i + 1});
  if (p.draft.positions || p.draft.tree) {
    if (p.draft.positions)
      out.origin = bounded(p.draft.positions[w.item.b * p.draft.position_batch + query * p.draft.position_row] +
                           bounded(bounded(x.row0) - bounded(x.col0)));
    const Int64 nk = of.s.nk, right = x.window_right < 0 ? nk : clamp(out.origin + bounded(x.window_right) + 1, 0, nk);
    keys.begin = x.window_left < 0 ? 0 : clamp(out.origin - bounded(x.window_left), 0, nk);
    keys.end = x.causal ? lesser(right, clamp(out.origin + 1, 0, nk)) : right;
    out.tree_end = Int32(right), out.tree = w.item.b * p.draft.tree_batch + query * p.draft.tree_row;
  }
  out.begin = Int32(keys.begin), out.end = Int32(keys.end);
  out.slope = x.slopes ? x.slopes[w.item.b * x.slope_batch + h * x.slope_head] : 0;
  return out;
}

}  // namespace tessera::decode
