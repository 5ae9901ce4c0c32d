// SPDX-License-Identifier: Apache-2.0
// What the kernel `append` is given: new tokens, the cache, where in it they go, and how they are rotated. Types are
// run-time numbers, so that one compiled kernel serves every call. Shared by host and device code.
// Implements docs/algorithm.md, "Append".
#pragma once

#include "gpu/config.hpp"
#include "gpu/pages.hpp"

namespace tessera::gpu {

// Rows of numbers of some type: [B,n,H,D], or [T,H,D] with batch = 0.
struct TypedRows {
  TokenRef rows;
  Element type;
};

// An i32 or i64 number for each token, [B,n], or [T] with batch = 0.
struct TokenNumbers {
  const void* data;  // null: none
  Int64 batch, token;
  Int32 wide;  // i64
  constexpr Int64 at(Int64 b, Int64 t) const {
    const Int64 n = b * batch + t * token;
    return wide ? static_cast<const Int64*>(data)[n] : static_cast<const Int32*>(data)[n];
  }
};

struct Rotary {
  const void *cos, *sin;
  Int64 cos_row, sin_row;
  Int64 positions;  // rows of them
  Int32 half;       // of the rotated dims; 0: no rotation
  Int32 interleaved;
  Element cos_type, sin_type;
};

// One side of the cache, and what goes there.
struct AppendSide {
  TypedRows from, to;  // to: the batch stride is that of pages, or of sequences
  ScaleRef scale;
  Int64 scale_group;  // from the scale of one group of dims to that of the next
  Int32 group_dims;   // that have a scale of their own: all, or append_group_dims
  Int32 computes_scale, width;
};

struct AppendParams {
  AppendSide k, v;
  TypedRows q, q_out;  // data null: no queries
  PageTables pages;
  LengthRef cu_seqlens_new, seqused_k;
  TokenNumbers slots, positions, q_positions;
  Rotary rotary;
  Int64 tokens, q_tokens;    // of each sequence; packed, of all
  Int64 capacity;            // places of a sequence, or, with slots, of the pool
  Int64 numbers, q_numbers;  // of tokens: as gpu::place_of counts blocks of one row
  Int32 B, Hk, Hq;
  Int32 wide;  // rows, dims and addresses allow four numbers at a time

  constexpr Int64 rows() const { return 2 * numbers * Hk + q_numbers * Hq; }
};

inline constexpr int append_threads = 128;
inline constexpr int append_group_dims = 128;  // where every so many dims of a row have a scale

}  // namespace tessera::gpu
