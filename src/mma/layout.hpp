// Which address a lane gives to ldmatrix, and which chunk of a tile a thread copies: the arithmetic of the `mma`
// kernels' shared memory. Constexpr text for the kernels and for the tests, which follow every element through ldmatrix
// and mma.sync as the PTX ISA describes them and count bank conflicts (tests/mma/mma_test.cpp).
#pragma once

#include "gpu/layout.hpp"

namespace tessera::mma {

// ldmatrix.x4 loads four matrices of 8 rows by 8 columns; lane l names row l % 8 of matrix l / 8. The rows and columns
// that a lane names, relative to the fragment's first ones.
//
// The first operand, 16 rows by 16 columns: the left matrices, upper and lower, then the right ones.
constexpr int a_row(int lane) { return lane % 16; }
constexpr int a_column(int lane) { return lane / 16 * 8; }
// The second operand of a product along rows (K in S = Q K^T), 16 rows by 16 columns: both halves of the columns of the
// first eight rows, then of the others. Registers 0 and 1 are the operand of eight columns of S, 2 and 3 of the next.
constexpr int b_row(int lane) { return lane % 8 + lane / 16 * 8; }
constexpr int b_column(int lane) { return lane / 8 % 2 * 8; }
// The second operand of a product over rows (V in O = P V), with .trans: 16 rows by 16 columns, named as the first
// operand's. Registers 0 and 1 are the operand of eight columns of O, 2 and 3 of the next.
constexpr int t_row(int lane) { return a_row(lane); }
constexpr int t_column(int lane) { return a_column(lane); }

// The byte of a lane's row in the first 16 columns and 16 rows of a tile. What moves it to other ones: 16 rows further
// is 2048 bytes, a panel further is rows * 128, and 16 columns further within the panel changes two bits of the chunk.
constexpr int lane_byte(int row, int column) { return gpu::tile_byte(16, row, column); }
inline constexpr int bytes_of_16_rows = 16 * gpu::panel_row_bytes;
// Columns 16 k to 16 k + 15 of a tile: what is added, and what bits 5 and 6 of the address are changed by.
constexpr int panel_step(int rows, int k) { return k / 4 * rows * gpu::panel_row_bytes; }
constexpr int column_turn(int k) { return k % 4 << 5; }

// dS of a block of keys, a row each, by so many queries. With fewer queries than a panel has columns, the keys are cut
// into so many parts as fill it side by side: part n has the columns from n * queries on.
constexpr int dS_rows(int keys, int queries) {
  return queries < gpu::panel_columns ? keys * queries / gpu::panel_columns : keys;
}
constexpr int dS_byte(int keys, int queries, int key, int query) {
  const int rows = dS_rows(keys, queries);
  return gpu::tile_byte(rows, key % rows, query + key / rows * queries);
}

// Copies: eight neighbouring threads have the chunks of a row of a panel.
constexpr int copy_row(int thread) { return thread / 8; }
constexpr int copy_column(int thread) { return thread % 8 * gpu::chunk_columns; }
constexpr int copy_rows_at_once(int threads) { return threads / 8; }

}  // namespace tessera::mma
