// SPDX-License-Identifier: Apache-2.0
// Which rows and keys a work item of the `decode` kernels has: lengths are read on the device, so that a captured graph
// follows them. One thread finds it out and describes it in shared memory. Device code.
#pragma once

#include "decode/config.hpp"
#include "decode/params.hpp"
#include "gpu/kernel/common.cuh"

namespace tessera::decode {

// A sequence, and what page tables add to it. Keys count from 0 behind the left padding.
struct PagedSequence {
  gpu::DeviceSequence s;
  Int64 leftpad;
  Range listed;  // by indptr: its entries
};

// Tokens alone. Unlike elsewhere (gpu/params.hpp), queries may be packed beside keys that are not: those in pages.
__device__ inline gpu::DeviceSequence lengths_of(const gpu::Question& x, Int32 b) {
  gpu::DeviceSequence s{0, 0, x.Nq, x.Nk, 0, {}};
  if (x.cu_seqlens_q.data) {
    const Range queries = gpu::packed_rows(x.cu_seqlens_q, b, x.Nq);
    s.q_begin = queries.begin, s.nq = lesser(queries.size(), x.most_queries);
  }
  if (x.cu_seqlens_k.data) {
    const Range keys = gpu::packed_rows(x.cu_seqlens_k, b, x.Nk);
    s.k_begin = keys.begin, s.nk = lesser(keys.size(), x.most_keys);
  }
  if (x.seqused_q.data) s.nq = clamp(x.seqused_q[b], 0, s.nq);
  if (x.seqused_k.data) s.nk = clamp(x.seqused_k[b], 0, s.nk);
  return s;
}

__device__ inline PagedSequence sequence_of(const Params& p, Int32 b) {
  const gpu::Question& x = p.call.x;
  PagedSequence out{lengths_of(x, b), 0, {}};
  gpu::DeviceSequence& s = out.s;
  if (p.pages.indptr.data) {
    out.listed = gpu::packed_rows(p.pages.indptr, b, p.pages.entries);
    s.nk = lesser(s.nk, out.listed.size() * p.pages.size);
  }
  if (p.pages.leftpad.data) out.leftpad = clamp(p.pages.leftpad[b], 0, s.nk);
  s.nk = lesser(s.nk - out.leftpad, p.most_keys);
  s.nq = lesser(s.nq, p.most_queries);
  gpu::set_band(x, s);
  return out;
}

// Whether a length says more than the plan, the table or the cache has room for, and was cut.
__device__ inline bool is_cut(const Params& p, Int32 b) {
  const gpu::Question& x = p.call.x;
  const gpu::DeviceSequence s = lengths_of(x, b);
  bool cut = s.nq > p.most_queries;
  if (x.cu_seqlens_q.data) cut = cut || gpu::packed_rows(x.cu_seqlens_q, b, x.Nq).size() > p.most_queries;
  if (!x.seqused_k.data) return cut;
  const Int64 used = x.seqused_k[b], leftpad = p.pages.leftpad.data ? p.pages.leftpad[b] : 0;
  const Int64 room =
      p.pages.indptr.data ? gpu::packed_rows(p.pages.indptr, b, p.pages.entries).size() * p.pages.size : x.Nk;
  return cut || used < 0 || used > room || leftpad < 0 || leftpad > used || used - leftpad > p.most_keys;
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

// Entry 0 of a sequence in a table.
__device__ inline Int64 first_entry(const Params& p, const PagedSequence& s, const gpu::PageTable& table, Int32 b) {
  return p.pages.indptr.data ? s.listed.begin * table.entry : b * table.sequence;
}

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
  w.k_entry = first_entry(p, of, p.pages.k, w.item.b), w.v_entry = first_entry(p, of, p.pages.v, w.item.b);
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
