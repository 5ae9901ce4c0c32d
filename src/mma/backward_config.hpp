// SPDX-License-Identifier: Apache-2.0
// What the compiler must know to specialise an `mma` backward kernel, and how its shared memory is laid out. Shared by
// host and device code. docs/gpu_kernels.md, "mma".
#pragma once

#include "mma/config.hpp"

namespace tessera::mma {

using gpu::Side;

// A block owns rows and streams columns. Upper case: the operands of its own rows, which stay; lower case: those of the
// columns. X and x are the operands of S, Y and y those of dP: Q and dO on the side of the queries, K and V on that of
// the keys. dX += dS x is dQ or dK, dY += P y is dV.
struct BackwardConfig {
  Side side = Side::queries;
  int D = 128, Dv = 128;                             // multiples of 16
  Element element = Element::bf16;                   // of Q, K, V and dO
  Element dX = Element::bf16, dY = Element::none;    // none: not wanted
  int warps = 4, row_tiles = 1, block_columns = 64;  // a warp has 16 rows times row_tiles
  int stages = 2;                                    // tiles of x, and of y
  int blocks_per_sm = 2;
  int copy_bytes = 16;
  bool whole = true, halves_S = false, turing = false, general = false;  // as in Config
  gpu::ScoreConfig options{};

  constexpr bool operator==(const BackwardConfig&) const = default;
};

constexpr int rows_of(const BackwardConfig& c) { return 16 * c.row_tiles * c.warps; }
constexpr int threads_of(const BackwardConfig& c) { return 32 * c.warps; }

struct BackwardLayout {
  int X, Y, x, y, numbers, work, bytes;
  int x_bytes, y_bytes, numbers_bytes;  // of a stage; numbers: LSE of every column, then delta
};

constexpr BackwardLayout layout_of(const BackwardConfig& c) {
  BackwardLayout l{};
  l.x_bytes = tile_bytes(c.block_columns, c.D), l.y_bytes = tile_bytes(c.block_columns, c.Dv);
  l.numbers_bytes = 8 * c.block_columns;
  l.X = 0;
  l.Y = l.X + tile_bytes(rows_of(c), c.D);
  l.x = l.Y + tile_bytes(rows_of(c), c.Dv);
  l.y = l.x + c.stages * l.x_bytes;
  l.numbers = l.y + c.stages * l.y_bytes;
  l.work = l.numbers + c.stages * l.numbers_bytes;
  l.bytes = l.work + work_bytes;
  return l;
}

}  // namespace tessera::mma
