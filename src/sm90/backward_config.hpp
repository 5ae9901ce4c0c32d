// SPDX-License-Identifier: Apache-2.0
// What the compiler must know to specialise a Hopper backward kernel, and how its shared memory is laid out. Shared by
// host and device code. The rows' operands stay, the columns' stream past. On either side QK is the one of Q and K that
// lies there, and VO the one of V and dO: S = row_QK column_QK^T, dP = row_VO column_VO^T.
#pragma once

#include "sm90/config.hpp"

namespace tessera::sm90 {

using gpu::Side;

struct BackwardConfig {
  Side side = Side::queries;        // the rows: Q and dO, which see K and V; or K and V, which see Q and dO
  int D = 128, Dv = 128;            // multiples of 64: what the tensors lack is 0 in shared memory
  Element element = Element::bf16;  // of Q, K, V and dO
  Element dQK = Element::bf16;      // of dQ, or dK: the gradient of row_QK; none where it is not wanted
  Element dV = Element::none;
  int warpgroups = 2;             // that compute, of 64 rows each unless they are paired; one more loads
  int block_columns = 64;         // of a tile
  int stages = 2, vo_stages = 2;  // tiles of column_QK, and of column_VO, in shared memory
  // A tile's sums end before the next tile's scores begin. That leaves registers for more columns.
  bool drains = false;
  // Two warpgroups share 64 rows, where dQK and dV together are more than a thread's registers: the first computes S
  // and P and sums dV, the second computes dP and dS and sums dQK. P goes from one to the other through shared memory.
  bool paired = false;
  // S is the sum of two products, of half the dims each, as in the forward pass: P is the same then.
  bool halves_S = false;
  // Scores are computed one by one, with whichever options are on, not as scale times S.
  bool general = false;
  gpu::ScoreConfig options{};

  constexpr bool operator==(const BackwardConfig&) const = default;
};

constexpr bool owns_queries(const BackwardConfig& c) { return c.side == Side::queries; }

// Tiles of 64 rows.
constexpr int row_tiles(const BackwardConfig& c) { return c.paired ? 1 : c.warpgroups; }
constexpr int rows_of(const BackwardConfig& c) { return 64 * row_tiles(c); }
constexpr int threads_of(const BackwardConfig& c) { return 128 * (c.warpgroups + 1); }

// Tiles of columns that a warpgroup may pass over at either end, because only others see them, while its last sums keep
// a place in the rings: what it waits for must find room. Sums of queries keep a tile of K. Those of keys keep one of
// Q and one of dO, and the end of one head's tiles is followed by the next one's beginning, and that by a tile of its
// own.
constexpr int most_passed(const BackwardConfig& c) {
  if (owns_queries(c)) return c.stages - 1;
  return ((c.stages < c.vo_stages ? c.stages : c.vo_stages) - 2) / 2;
}

// Registers of a thread, by role (setmaxnreg).
constexpr int producer_registers(const BackwardConfig& c) { return c.warpgroups == 2 ? 24 : 32; }
constexpr int consumer_registers(const BackwardConfig& c) { return c.warpgroups == 2 ? 240 : 160; }

// Places for P on its way between paired warpgroups: the first may be so many tiles ahead.
constexpr int slots_of_P(const BackwardConfig& c) { return c.paired ? 2 : 0; }

// Byte offsets. Tiles begin at multiples of 1024, as the 128-byte swizzle demands.
struct BackwardLayout {
  int row_QK, row_VO, column_QK, column_VO, P, lse2, delta, blind, work, barriers,
      bytes;  // row_QK, row_VO: one for each 64 rows
  int row_QK_bytes, row_VO_bytes, column_QK_bytes, column_VO_bytes, P_bytes;
};

constexpr BackwardLayout layout_of(const BackwardConfig& c) {
  BackwardLayout l{};
  l.row_QK_bytes = 64 * c.D * 2, l.row_VO_bytes = 64 * c.Dv * 2;
  l.column_QK_bytes = c.block_columns * c.D * 2, l.column_VO_bytes = c.block_columns * c.Dv * 2;
  l.P_bytes = 64 * c.block_columns * 4;
  l.row_QK = 0;
  l.row_VO = l.row_QK + row_tiles(c) * l.row_QK_bytes;
  l.column_QK = l.row_VO + row_tiles(c) * l.row_VO_bytes;
  l.column_VO = l.column_QK + c.stages * l.column_QK_bytes;
  l.P = l.column_VO + c.vo_stages * l.column_VO_bytes;
  // Of streamed queries, a row of numbers per stage, and whether one of them is to be left out.
  l.lse2 = l.P + slots_of_P(c) * l.P_bytes;
  l.delta = l.lse2 + c.stages * c.block_columns * 4;
  l.blind = l.delta + c.stages * c.block_columns * 4;
  l.work = l.blind + c.stages * 8;
  l.barriers = l.work + work_bytes;
  l.bytes = l.barriers + 8 * (row_tiles(c) + 2 * (c.stages + c.vo_stages + slots_of_P(c)));
  return l;
}

}  // namespace tessera::sm90
