// SPDX-License-Identifier: Apache-2.0
// Keys in the pages of a cache, as kernels are given them: page tables, scales, and the status word. Plain data; shared
// by host and device code. Included by what reads a cache (src/decode, src/mma) and by what writes one
// (gpu/append_params.hpp).
// Implements docs/algorithm.md, "Paged keys and values".
#pragma once

#include "gpu/params.hpp"

namespace tessera::gpu {

// Pages of K, or of V: entry n of sequence b is entries[b * sequence + n * entry]; listed by indptr, b * sequence is
// indptr[b] * entry.
struct PageTable {
  const Int32* entries;  // null: no pages
  Int64 sequence, entry;
  Int64 pages;  // of the pool
};

struct PageTables {
  PageTable k, v;
  LengthRef indptr, leftpad;  // data null: none
  Int64 entries;              // listed by indptr: of all sequences; else of one
  Int64 size;                 // keys of a page
  Int32* status;              // or null
};

// What a plan has room for of one sequence; what is longer is cut.
struct LengthBounds {
  Int64 queries, keys;
};

// Sequences of so few rows, queries times heads of a KV head, are `decode`'s wherever it takes the problem, whatever
// the call's other sequences are: so a row's bits depend on its own sequence.
inline constexpr int few_rows = 64;

// Bits of the status word, as tessera.h has them.
inline constexpr Int32 page_outside_pool = 1, beyond_bounds = 2;

// A scale of each key and head, of however many dimensions: those that it lacks have stride 0. `page`: of the pool, or
// the sequence, where keys lie in one piece for each; `place`: in it.
struct ScaleRef {
  float* data;  // null: none, all are 1
  Int64 sequence, page, place, head;
  constexpr float* at(Int64 b, Int64 of_page, Int64 of_place, Int64 h) const {
    return data + b * sequence + of_page * page + of_place * place + h * head;
  }
};

}  // namespace tessera::gpu
