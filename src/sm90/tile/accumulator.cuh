// SPDX-License-Identifier: Apache-2.0
// What both passes of the Hopper kernels do with a warpgroup's accumulators of 64 rows: products into them, the band
// of the mask, and the way to memory. Every thread has two rows; value n belongs to row n / 2 % 2. Device code.
#pragma once

#include "gpu/kernel/accumulator.cuh"
#include "sm90/layout.hpp"
#include "sm90/ptx/math.cuh"
#include "sm90/ptx/tma.cuh"
#include "sm90/ptx/wgmma.cuh"

namespace tessera::sm90 {

// d = a b^T, both along their rows, over columns 16 first to 16 end; a has 64 rows, b has n. in_place: see Wgmma.
template <int n, Element element, bool in_place, int first, int end>
__device__ inline void multiply_along_rows(float (&d)[n / 2], Operand a, Operand b) {
  const auto at = [](Operand o, int rows, int k) { return o.plus(step_along_rows(rows, k)); };
  using Instruction = Wgmma<n, element>;
  if constexpr (in_place)
    Instruction::set_in_place(d, at(a, 64, first), at(b, n, first));
  else
    Instruction::set(d, at(a, 64, first), at(b, n, first));
#pragma unroll
  for (int k = first + 1; k < end; ++k) Instruction::add(d, at(a, 64, k), at(b, n, k));
}

// d += a b, or d = a b without `accumulate`; a in registers, b over its `rows` rows.
template <int n, Element element, int rows>
__device__ inline void multiply_over_rows(float (&d)[n / 2], const UInt32 (&a)[rows / 4], Operand b, bool accumulate) {
  Wgmma<n, element>::add(d, &a[0], b, accumulate);
#pragma unroll
  for (int k = 1; k < rows / 16; ++k) Wgmma<n, element>::add(d, &a[4 * k], b.plus(step_over_rows(k)), true);
}

using gpu::add_row;
using gpu::hide;
using gpu::scale_rows;
using gpu::seen_columns;
using gpu::SeenColumns;
using gpu::store_row;

// Rows of a tile in shared memory become 0, by a warpgroup's threads: memory may hold NaN where P is 0, and 0 NaN is
// NaN. Needs publish_shared() and the warpgroup's barrier before it is multiplied with.
template <int rows, int columns, class Unused>
__device__ inline void clear_rows(UInt32 tile, int thread, int first, Unused unused) {
  constexpr int chunks = columns / chunk_columns;
  for (int n = first * chunks + thread; n < rows * chunks; n += 128)
    if (unused(n / chunks)) clear_chunk(tile + tile_byte(rows, n / chunks, n % chunks * chunk_columns));
}

}  // namespace tessera::sm90
