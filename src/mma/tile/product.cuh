// SPDX-License-Identifier: Apache-2.0
// Products of a warp, between tiles in shared memory and fragments in registers. A warp has R tiles of 16 rows;
// addresses are those that a lane gives to ldmatrix for the first 16 rows and columns (mma/layout.hpp). Device code.
#pragma once

#include "gpu/kernel/matrix.cuh"
#include "mma/layout.hpp"

namespace tessera::mma {

using gpu::load_matrices, gpu::multiply, gpu::recomputed, gpu::turned;

// S = a b^T, both along their rows, over columns 16 first to 16 end; a's tile has a_rows rows, b's has `columns`.
template <auto config, int a_rows, int first, int end, int R, int values>
__device__ inline void multiply_along_rows(float (&S)[R][values], UInt32 a, UInt32 b) {
  constexpr int columns = 2 * values;
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int n = 0; n < values; ++n) S[r][n] = 0;
#pragma unroll
  for (int k = first; k < end; ++k) {
    UInt32 x[R][4];
#pragma unroll
    for (int r = 0; r < R; ++r)
      load_matrices<false>(x[r], turned(a, column_turn(k)) + panel_step(a_rows, k) + r * bytes_of_16_rows);
    const UInt32 b_columns = turned(b, column_turn(k)) + panel_step(columns, k);
#pragma unroll
    for (int j = 0; j < columns / 16; ++j) {
      UInt32 y[4];
      load_matrices<false>(y, b_columns + j * bytes_of_16_rows);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        multiply<config.element, config.turing>(&S[r][8 * j], x[r], y[0], y[1]);
        multiply<config.element, config.turing>(&S[r][8 * j + 4], x[r], y[2], y[3]);
      }
    }
  }
}

// sums += a b, over the 16 `steps` rows of b.
template <auto config, int R, int steps, int values>
__device__ inline void multiply_over_rows(float (&sums)[R][values], const UInt32 (&a)[R][steps][4], UInt32 b) {
#pragma unroll
  for (int j = 0; j < steps; ++j)
#pragma unroll
    for (int c = 0; c < values / 8; ++c) {
      UInt32 y[4];
      load_matrices<true>(y, turned(b, column_turn(c)) + panel_step(16 * steps, c) + j * bytes_of_16_rows);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        multiply<config.element, config.turing>(&sums[r][8 * c], a[r][j], y[0], y[1]);
        multiply<config.element, config.turing>(&sums[r][8 * c + 4], a[r][j], y[2], y[3]);
      }
    }
}

// sums = a^T b, over the `terms` rows of both; a lies as dS does (dS_byte), with a_rows rows and `columns` columns for
// each of their parts. R: tiles of 16 of a's columns.
template <auto config, int terms, int a_rows, int columns, int R, int values>
__device__ inline void multiply_turned(float (&sums)[R][values], UInt32 a, UInt32 b) {
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int n = 0; n < values; ++n) sums[r][n] = 0;
#pragma unroll
  for (int j = 0; j < terms / 16; ++j) {
    const int part = 16 * j / a_rows, row = 16 * j % a_rows;
    UInt32 x[R][4];
#pragma unroll
    for (int r = 0; r < R; ++r)
      load_matrices<true>(x[r], turned(a, column_turn(part * columns / 16 + r)) + row * gpu::panel_row_bytes);
#pragma unroll
    for (int c = 0; c < values / 8; ++c) {
      UInt32 y[4];
      load_matrices<true>(y, turned(b, column_turn(c)) + panel_step(terms, c) + j * bytes_of_16_rows);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        multiply<config.element, config.turing>(&sums[r][8 * c], x[r], y[0], y[1]);
        multiply<config.element, config.turing>(&sums[r][8 * c + 4], x[r], y[2], y[3]);
      }
    }
  }
}

}  // namespace tessera::mma
