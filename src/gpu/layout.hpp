// SPDX-License-Identifier: Apache-2.0
// Where elements of 16-bit tiles lie in shared memory, and which element of an accumulator a thread holds: facts that
// tensor cores of several generations share. Constexpr text for the kernels and for the tests that emulate the hardware
// on the host. Facts: PTX ISA, "mma.m16n8k16", "ldmatrix", and wgmma's "128-byte swizzle", which is the same layout.
#pragma once

#include "math/types.hpp"

namespace tessera::gpu {

// A tile of `rows` rows is stored as panels of 64 columns (128 bytes), one after another. In a panel, 16-byte chunk c
// of row r lies at chunk c xor (r mod 8) of its row.
inline constexpr int panel_columns = 64, panel_row_bytes = 128, chunk_bytes = 16, chunk_columns = 8;

constexpr int tile_byte(int rows, int row, int column) {
  const int panel = column / panel_columns, chunk = column % panel_columns / chunk_columns;
  return panel * rows * panel_row_bytes + row * panel_row_bytes + (chunk ^ (row & 7)) * chunk_bytes +
         column % chunk_columns * 2;
}

// Accumulator of 16 rows per warp: value n of a thread is row accumulator_row(thread, n), column accumulator_column(
// thread, n). The same pairs of values, packed in their order, are an operand in registers: four registers for 16
// columns.
constexpr int accumulator_row(int thread, int n) { return thread / 32 * 16 + thread % 32 / 4 + n / 2 % 2 * 8; }
constexpr int accumulator_column(int thread, int n) { return n / 4 * 8 + thread % 4 * 2 + n % 2; }

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
constexpr int lane_byte(int row, int column) { return tile_byte(16, row, column); }
inline constexpr int bytes_of_16_rows = 16 * panel_row_bytes;
// Columns 16 k to 16 k + 15 of a tile: what is added, and what bits 5 and 6 of the address are changed by.
constexpr int panel_step(int rows, int k) { return k / 4 * rows * panel_row_bytes; }
constexpr int column_turn(int k) { return k % 4 << 5; }

// Copies: eight neighbouring threads have the chunks of a row of a panel.
constexpr int copy_row(int thread) { return thread / 8; }
constexpr int copy_column(int thread) { return thread % 8 * chunk_columns; }
constexpr int copy_rows_at_once(int threads) { return threads / 8; }

}  // namespace tessera::gpu
