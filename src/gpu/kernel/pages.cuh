// SPDX-License-Identifier: Apache-2.0
// Sequences whose keys lie in the pages of a cache: their lengths, which are read on the device so that a captured
// graph follows them, and where a key lies. Device code; shared by the families that read caches. Implements
// docs/algorithm.md, "Paged keys and values".
#pragma once

#include "gpu/kernel/common.cuh"
#include "gpu/pages.hpp"

namespace tessera::gpu {

// A sequence, and what page tables add to it. Keys count from 0 behind the left padding.
struct PagedSequence {
  DeviceSequence s;
  Int64 leftpad;
  Range listed;  // by indptr: its entries
};

// Tokens alone. Unlike elsewhere (gpu/params.hpp), queries may be packed beside keys that are not: those in pages.
__device__ inline DeviceSequence lengths_of(const Question& x, Int32 b) {
  DeviceSequence s{0, 0, x.Nq, x.Nk, 0, {}};
  if (x.cu_seqlens_q.data) {
    const Range queries = packed_rows(x.cu_seqlens_q, b, x.Nq);
    s.q_begin = queries.begin, s.nq = lesser(queries.size(), x.most_queries);
  }
  if (x.cu_seqlens_k.data) {
    const Range keys = packed_rows(x.cu_seqlens_k, b, x.Nk);
    s.k_begin = keys.begin, s.nk = lesser(keys.size(), x.most_keys);
  }
  if (x.seqused_q.data) s.nq = clamp(x.seqused_q[b], 0, s.nq);
  if (x.seqused_k.data) s.nk = clamp(x.seqused_k[b], 0, s.nk);
  return s;
}

// All but its band.
__device__ inline PagedSequence paged_lengths(const Question& x, const PageTables& pages, const LengthBounds& most,
                                              Int32 b) {
  PagedSequence out{lengths_of(x, b), 0, {}};
  DeviceSequence& s = out.s;
  if (pages.indptr.data) {
    out.listed = packed_rows(pages.indptr, b, pages.entries);
    s.nk = lesser(s.nk, out.listed.size() * pages.size);
  }
  if (pages.leftpad.data) out.leftpad = clamp(pages.leftpad[b], 0, s.nk);
  s.nk = lesser(s.nk - out.leftpad, most.keys);
  s.nq = lesser(s.nq, most.queries);
  return out;
}
__device__ inline PagedSequence paged_sequence(const Question& x, const PageTables& pages, const LengthBounds& most,
                                               Int32 b) {
  PagedSequence out = paged_lengths(x, pages, most, b);
  set_band(x, out.s);
  return out;
}

// Whether a length says more than the plan, the table or the cache has room for, and was cut.
__device__ inline bool is_cut(const Question& x, const PageTables& pages, const LengthBounds& most, Int32 b) {
  const DeviceSequence s = lengths_of(x, b);
  bool cut = s.nq > most.queries;
  if (x.cu_seqlens_q.data) cut = cut || packed_rows(x.cu_seqlens_q, b, x.Nq).size() > most.queries;
  if (!x.seqused_k.data) return cut;
  const Int64 used = x.seqused_k[b], leftpad = pages.leftpad.data ? pages.leftpad[b] : 0;
  const Int64 room = pages.indptr.data ? packed_rows(pages.indptr, b, pages.entries).size() * pages.size : x.Nk;
  return cut || used < 0 || used > room || leftpad < 0 || leftpad > used || used - leftpad > most.keys;
}

// Entry 0 of a sequence in a table.
__device__ inline Int64 first_entry(const PageTables& pages, const PagedSequence& s, const PageTable& table, Int32 b) {
  return pages.indptr.data ? s.listed.begin * table.entry : b * table.sequence;
}

// The page with key `number` of a sequence, left padding counted; first: entry 0 of the sequence. Below 0: none of the
// pool, which the status word is told.
__device__ inline Int32 page_of(const PageTables& pages, const PageTable& table, Int64 first, UInt32 number) {
  const Int32 page = table.entries[first + number / UInt32(pages.size) * table.entry];
  if (page >= 0 && page < table.pages) return page;
  if (pages.status) atomicOr(pages.status, page_outside_pool);
  return -1;
}
// Where in its page it lies.
__device__ inline UInt32 place_in_page(const PageTables& pages, UInt32 number) { return number % UInt32(pages.size); }

}  // namespace tessera::gpu
