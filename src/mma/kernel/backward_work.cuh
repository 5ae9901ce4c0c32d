// SPDX-License-Identifier: Apache-2.0
// What a block of the `mma` backward kernels works on: rows of one head, and the tiles of columns that they see, of all
// heads of the group where the rows are keys. One thread describes it in shared memory. Device code.
#pragma once

#include "gpu/kernel/common.cuh"
#include "mma/backward_config.hpp"
#include "mma/params.hpp"

namespace tessera::mma {

struct BackwardWork {
  Int64 row_begin, column_begin;   // of the sequence
  Int64 shift;                     // of the diagonal
  Int32 b, row_head, head, heads;  // row_head: of the rows; head, heads: of the columns
  Int32 first, rows, columns;      // the tile's first row; of so many rows and columns in its sequence
  Int32 low, high;                 // of the columns that the tile's row 0 sees; those of row r are r more
  Int32 begin, end;                // tiles of columns
};
static_assert(sizeof(BackwardWork) <= work_bytes);

// Block `number` of those that own `rows` rows of one side, while tiles of `columns` stream past: heads in sections, as
// in the forward pass; the rows that see the most come first when causal.
template <Side side, int rows, int columns>
__device__ inline void describe_work(const gpu::Question& x, Int32 tiles_per_head, Int32 heads_together, Int32 number,
                                     BackwardWork& w) {
  constexpr bool queries = side == Side::queries;
  const gpu::LengthRef& cu_seqlens = queries ? x.cu_seqlens_q : x.cu_seqlens_k;
  const Int32 section_tiles = heads_together * tiles_per_head, heads = queries ? x.Hq : x.Hk, group = x.Hq / x.Hk;
  const Int32 section = number / section_tiles, rest = number % section_tiles;
  const Int32 head = section * heads_together + rest % heads_together, place = rest / heads_together;
  const Int32 tile = queries ? tiles_per_head - 1 - place : place;
  if (cu_seqlens.data) {
    const gpu::BlockPlace at = gpu::place_of(tile, rows, x.B, queries ? x.Nq : x.Nk, cu_seqlens);
    w.b = at.b, w.row_head = head, w.first = Int32(at.first);
  } else {
    w.b = head / heads, w.row_head = head % heads, w.first = tile * rows;
  }
  w.head = queries ? w.row_head / group : w.row_head * group, w.heads = queries ? 1 : group;
  const gpu::DeviceSequence s = gpu::sequence_of(x, w.b);
  w.row_begin = queries ? s.q_begin : s.k_begin, w.column_begin = queries ? s.k_begin : s.q_begin;
  w.rows = Int32(queries ? s.nq : s.nk), w.columns = Int32(queries ? s.nk : s.nq);
  w.shift = s.shift;
  constexpr Int64 far = Int64(1) << 30;
  w.low = Int32(clamp((queries ? s.mask.low : -s.mask.high) + w.first, -far, far));
  w.high = Int32(clamp((queries ? s.mask.high : -s.mask.low) + w.first, -far, far));
  const Int32 last = Int32(lesser(rows, w.rows - w.first)) - 1;
  const Int64 first_seen = clamp(w.low, 0, w.columns), end_seen = clamp(Int64(w.high) + last + 1, 0, w.columns);
  w.begin = Int32(first_seen) / columns;
  const bool sees = w.heads > 0 && last >= 0 && first_seen < end_seen;
  w.end = sees ? Int32(ceil_div(end_seen, columns)) : w.begin;
}

}  // namespace tessera::mma
