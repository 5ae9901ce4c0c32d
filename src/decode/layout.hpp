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

// Keys of 8 bits: a lane gets four neighbouring dims of each 16, which stand for terms 2 t, 2 t + 1, 2 t + 8 and 2 t +
// 9 of a product. Where Q's dim d of 16 must lie for that; pairs stay together.
constexpr int slot_of(int d) { return d / 4 * 2 + d % 4 / 2 * 8 + d % 2; }
// Values of 8 bits: 32 keys by 16 dims are four matrices of eight keys, in pairs of dims. Once the two middle bytes
// have changed places, a register holds two keys of an even dim and the same keys of the next: rows g and g + 8 of a
// product are dims 2 g and 2 g + 1.
constexpr int v8_key(int lane) { return lane; }
inline constexpr unsigned v8_bytes = 0x3120;
// Dims 64 v + 16 warp to 64 v + 16 warp + 15 are chunk `warp` of the first half of a panel, or of its second; where
// there are eight warps, v is even.
constexpr int v8_step(int rows, int v) { return v / 2 * rows * gpu::panel_row_bytes; }
constexpr int v8_turn(int v) { return v % 2 << 6; }

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
