// SPDX-License-Identifier: Apache-2.0
// Where the elements of P lie in shared memory, and which address a lane gives to ldmatrix for the operands of the
// column engine: K and V are left operands (16 keys, or 16 dims, by 16 terms), rows of Q and P are columns of the right
// ones. Constexpr text for the kernel and for the tests, which follow every element through ldmatrix and mma.sync and
// count bank conflicts (tests/decode/decode_test.cpp).
#pragma once

#include "gpu/layout.hpp"

namespace tessera::decode {

// K, 16 keys by 16 dims, lies as the product takes it: gpu::a_row, a_column. V, 16 keys by 16 dims, is turned: its dims
// are the rows of the product, so the four matrices are both halves of the dims of eight keys, then of the others.
constexpr int v_key(int lane) { return gpu::b_row(lane); }
constexpr int v_dim(int lane) { return gpu::b_column(lane); }

// Q, eight rows by 32 dims: the operands of two products of 16 terms.
constexpr int q_row(int lane) { return lane % 8; }
constexpr int q_dim(int lane) { return lane / 8 * 8; }
// Dims 32 k to 32 k + 31: what is added, and which bits of the address are changed.
constexpr int q_step(int rows, int k) { return k / 2 * rows * gpu::panel_row_bytes; }
constexpr int q_turn(int k) { return k % 2 << 6; }

// P, 32 keys by eight rows, turned: the operands of two products of 16 keys.
constexpr int p_key(int lane) { return lane; }

// P has a row for each key, of `rows` numbers. Chunk c (rows 8 c to 8 c + 7 of the queries) of a key is moved so that
// the same chunk of eight neighbouring keys fills all banks once.
constexpr int p_byte(int rows, int key, int row) {
  const int chunks = rows / 8, turn = key * chunks / 8 % chunks;
  return key * rows * 2 + (row / 8 ^ turn) * gpu::chunk_bytes + row % 8 * 2;
}
constexpr int p_turn(int chunk) { return chunk << 4; }

}  // namespace tessera::decode
