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

  // `vector` only: the tile, and the options that change the code. What is off costs nothing.
  int block_q = 0, block_k = 0, rows_per_thread = 0;
  bool wide_loads = false;  // rows are aligned to 16 bytes
  bool softcap = false, alibi = false, mask = false, dropout = false;
  Element bias = Element::none;

  constexpr bool operator==(const Config&) const = default;
};

// --- the tile of `vector`

// 16 threads share a row of queries, so a row's maximum and sum need shuffles inside half a warp only.
inline constexpr int lanes_per_row = 16;

// Widths in shared memory: products read four floats at a time, O's columns are dealt out in groups of 64.
constexpr int padded_dims(const Config& c) { return int(round_up(c.D, 4)); }
constexpr int padded_values(const Config& c) { return int(round_up(c.Dv, 4 * lanes_per_row)); }

// The forward kernel's shared memory. Rows that are read by several threads at once are 4 floats longer than they need
// to be, so that 8 neighbouring rows fall into different banks.
template <Config c>
struct VectorForwardShared {
  float Q[c.block_q][padded_dims(c) + 4];
  float K[c.block_k][padded_dims(c) + 4];
  float V[c.block_k][padded_values(c)];
  float P[c.block_q][c.block_k + 4];
};

// Its size, for the planner, which knows the configuration at run time only. The kernel asserts that they agree.
constexpr int vector_forward_shared_bytes(const Config& c) {
  return 4 *
         ((c.block_q + c.block_k) * (padded_dims(c) + 4) + c.block_k * padded_values(c) + c.block_q * (c.block_k + 4));
}

}  // namespace tessera::simt
