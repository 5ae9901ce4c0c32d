// What the compiler must know to specialise a kernel of the ladder: one structural value, written into the generated
// unit. Lengths, strides, scale and window widths are Params: they never compile a new kernel. Shared by host and
// device text.
#pragma once

#include "math/types.hpp"

namespace tessera::simt {

enum class Element { f32, f16, bf16, none };

struct Config {
  int threads = 128;
  int D = 64, Dv = 64;
  Element element = Element::f32;  // q, k, v
  Element o = Element::f32, d_o = Element::f32;
  Element dq = Element::f32, dk = Element::f32, dv = Element::f32;

  // `vector` only: the tile, and the options that change the code. What is off costs nothing. Rows are what a block
  // owns (queries, or the keys whose gradients it computes); columns are what streams past.
  int block_rows = 0, block_cols = 0, rows_per_thread = 0;
  bool wide_loads = false;  // rows are aligned to 16 bytes
  bool softcap = false, alibi = false, mask = false, dropout = false;
  Element bias = Element::none;

  constexpr bool operator==(const Config&) const = default;
};

// --- the tiles of `vector`

// 16 threads share a row, so a row's maximum and sum need shuffles inside half a warp only.
inline constexpr int lanes_per_row = 16;

// Widths in shared memory. Products over dims read four floats at a time; sums over a tile's columns deal their
// results' columns out in groups of 64, four to a lane. Rows that several threads read at once are 4 floats longer than
// that, so that 8 neighbouring rows fall into different banks.
constexpr int padded_to_4(int width) { return int(round_up(width, 4)); }
constexpr int padded_to_64(int width) { return int(round_up(width, 4 * lanes_per_row)); }

template <Config c>
struct VectorForwardShared {
  float Q[c.block_rows][padded_to_4(c.D) + 4];
  float K[c.block_cols][padded_to_4(c.D) + 4];
  float V[c.block_cols][padded_to_64(c.Dv)];
  float P[c.block_rows][c.block_cols + 4];
};

// The backward kernels: X and Y are the rows' operands of S and dP (q and dO, or k and v), x and y the columns'.
template <Config c>
struct VectorBackwardShared {
  float X[c.block_rows][padded_to_4(c.D) + 4];
  float Y[c.block_rows][padded_to_4(c.Dv) + 4];
  float x[c.block_cols][padded_to_64(c.D) + 4];
  float y[c.block_cols][padded_to_64(c.Dv) + 4];
  float P[c.block_rows][c.block_cols + 4];
};

// Their sizes, for the planner, which knows the configuration at run time only. The kernels assert that they agree.
constexpr int vector_forward_shared_bytes(const Config& c) {
  return 4 * ((c.block_rows + c.block_cols) * (padded_to_4(c.D) + 4) + c.block_cols * padded_to_64(c.Dv) +
              c.block_rows * (c.block_cols + 4));
}
constexpr int vector_backward_shared_bytes(const Config& c) {
  return 4 * (c.block_rows * (padded_to_4(c.D) + padded_to_4(c.Dv) + 8) +
              c.block_cols * (padded_to_64(c.D) + padded_to_64(c.Dv) + 8) + c.block_rows * (c.block_cols + 4));
}

}  // namespace tessera::simt
