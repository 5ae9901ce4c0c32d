// SPDX-License-Identifier: Apache-2.0
// The arithmetic of Hopper's shared-memory tiles: where TMA puts an element, where wgmma looks for it, which element of
// an accumulator a thread holds, and where stmatrix puts it. Constexpr text for the kernels and for the tests that
// emulate the hardware on the host (tests/sm90/sm90_test.cpp). Facts: PTX ISA, "Asynchronous warpgroup level matrix
// instructions" and "Tensor copy"; 16-bit elements, 128-byte swizzle.
#pragma once

#include "gpu/layout.hpp"

namespace tessera::sm90 {

using gpu::accumulator_column;
using gpu::accumulator_row;
using gpu::chunk_bytes;
using gpu::chunk_columns;
using gpu::panel_columns;
using gpu::panel_row_bytes;
using gpu::tile_byte;

// What wgmma is told about a tile in shared memory: addresses and distances in units of 16 bytes, and the swizzle.
struct Operand {
  UInt64 bits;
  constexpr Operand plus(int bytes) const { return {bits + UInt64(bytes / 16)}; }
};

constexpr Operand operand(UInt32 address, int leading_bytes, int stride_bytes) {
  constexpr UInt64 swizzle_128_bytes = UInt64(1) << 62;
  return {UInt64((address & 0x3ffffu) >> 4) | UInt64(leading_bytes / 16) << 16 | UInt64(stride_bytes / 16) << 32 |
          swizzle_128_bytes};
}

// The contraction runs along a row (Q and K in S = Q K^T): groups of 8 rows are 1024 bytes apart.
constexpr Operand along_rows(UInt32 address) { return operand(address, 16, 1024); }
// Bytes from the tile's beginning to its columns 16 k, 16 k + 1, ...
constexpr int step_along_rows(int rows, int k) { return k / 4 * rows * panel_row_bytes + k % 4 * 32; }

// The contraction runs over the rows (V in O = P V): panels are `rows` rows apart, groups of 8 rows 1024 bytes.
constexpr Operand over_rows(UInt32 address, int rows) { return operand(address, rows * panel_row_bytes, 1024); }
// Bytes to rows 16 k, 16 k + 1, ...
constexpr int step_over_rows(int k) { return k * 16 * panel_row_bytes; }

// stmatrix.x4 stores the four registers of 16 columns: lane l names the address of this row and 8 columns.
constexpr int store_row(int thread) { return thread / 32 * 16 + thread % 16; }
constexpr int store_column(int thread, int k) { return 16 * k + thread % 32 / 16 * 8; }

// The same with the matrix turned over: its columns become rows of a tile, 16 of them in step k, and the 64 rows of
// warpgroup g are columns 64 g to 64 g + 63.
constexpr int turned_row(int thread, int k) { return 16 * k + thread % 32 / 16 * 8 + thread % 8; }
constexpr int turned_column(int thread, int g) { return 64 * g + thread / 32 * 16 + thread / 8 % 2 * 8; }

}  // namespace tessera::sm90
