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

}  // namespace tessera::gpu
