// What the compiler must know to specialise a kernel of the ladder: one structural value, written into the generated
// unit. Lengths, strides, scale and window widths are Params: they never compile a new kernel. Shared by host and
// device text.
#pragma once

#include "gpu/config.hpp"

namespace tessera::simt {

using namespace gpu;  // the layer below

struct Config {
  int threads = 128;
  int D = 64, Dv = 64;
  Element element = Element::f32;  // q, k, v
  Element o = Element::f32, d_o = Element::f32;
  Element dq = Element::f32, dk = Element::f32, dv = Element::f32;  // `vector`: none where this kernel leaves it out
  Element dbias = Element::none;

  // The tile, in all rungs but `naive`, and the options that change the code of `vector`. What is off costs nothing.
  // There rows are what a block owns (queries, or the keys whose gradients it computes); columns are what streams past.
  int block_rows = 0, block_cols = 0, rows_per_thread = 0;
  int stages = 1;             // tiles of columns in shared memory: with 2, one arrives while the other is worked on
  int blocks_per_sm = 1;      // the compiler keeps registers few enough for this many
  bool tensor_cores = false;  // products by TF32 tensor cores, f32 operands split in two; otherwise by FMA
  bool wide_loads = false;    // rows are aligned to 16 bytes
  bool own_delta = false;     // the kernel for dQ prepares delta and LSE, also for those after it: a launch less
  ScoreConfig options{};

  constexpr bool operator==(const Config&) const = default;
};

constexpr int greater_of(int a, int b) { return a > b ? a : b; }

// --- the tiles of `vector`

// How products are dealt out to threads. FMA: 16 lanes share a row of a tile, and deal the columns of a result out in
// groups of 64, four to a lane. Tensor cores: 4 lanes share a row, and groups have 32 columns.
inline constexpr int fma_lanes = 16, tensor_lanes = 4;
constexpr int group_columns(const Config& c) { return c.tensor_cores ? 32 : 64; }

// Numbers in a row of a tile in shared memory that hold `width` dims, 0 beyond them; and the distance between rows: 4
// more, so that the rows that a warp reads at once fall into different banks.
constexpr int tile_width(const Config& c, int width) { return int(round_up(width, group_columns(c))); }
constexpr int tile_pitch(const Config& c, int width) { return tile_width(c, width) + 4; }

template <Config c>
struct VectorForwardShared {
  float Q[c.block_rows][tile_pitch(c, c.D)];
  float K[c.stages][c.block_cols][tile_pitch(c, c.D)];
  float V[c.stages][c.block_cols][tile_pitch(c, c.Dv)];
  float P[c.block_rows][c.block_cols + 4];  // on its way from one product to the next
};

// The backward kernels: X and Y are the rows' operands of S and dP (q and dO, or k and v), x and y the columns'. LSE
// and delta are the queries', which are the rows or the columns.
template <Config c>
struct VectorBackwardShared {
  float X[c.block_rows][tile_pitch(c, c.D)];
  float Y[c.block_rows][tile_pitch(c, c.Dv)];
  float x[c.stages][c.block_cols][tile_pitch(c, c.D)];
  float y[c.stages][c.block_cols][tile_pitch(c, c.Dv)];
  float P[c.block_rows][c.block_cols + 4];
  float lse2[c.stages][greater_of(c.block_rows, c.block_cols)], delta[c.stages][greater_of(c.block_rows, c.block_cols)];
};

// Their sizes, for the planner, which knows the configuration at run time only. The kernels assert that they agree.
constexpr int vector_forward_shared_bytes(const Config& c) {
  return 4 * (c.block_rows * tile_pitch(c, c.D) + c.stages * c.block_cols * (tile_pitch(c, c.D) + tile_pitch(c, c.Dv)) +
              c.block_rows * (c.block_cols + 4));
}
constexpr int vector_backward_shared_bytes(const Config& c) {
  return 4 * ((c.block_rows + c.stages * c.block_cols) * (tile_pitch(c, c.D) + tile_pitch(c, c.Dv)) +
              c.block_rows * (c.block_cols + 4) + 2 * c.stages * greater_of(c.block_rows, c.block_cols));
}

// --- the tiles of `tiled`: block_rows queries by block_cols keys

// Rows in shared memory are filled up with zeros, so that threads with a column each cover them evenly, and are 4
// longer than that, so that neighbouring rows, of which lanes read four numbers at a time, fall into different banks.
constexpr int tiled_width(const Config& c, int width) { return int(round_up(width, c.block_rows)); }
constexpr int tiled_pitch(const Config& c, int width) { return tiled_width(c, width) + 4; }

template <Config c>
struct TiledForwardShared {
  float Q[c.block_rows][tiled_pitch(c, c.D)];
  float K[c.block_cols][tiled_pitch(c, c.D)];
  float V[c.block_cols][tiled_pitch(c, c.Dv)];
  float S[c.block_rows][c.block_cols + 8];  // scores, then P; groups of 8 lanes read a row each
  float factor[c.block_rows];               // of the rows of O: alpha, in the end 1 / l
};

template <Config c>
struct TiledBackwardShared {
  float Q[c.block_rows][tiled_pitch(c, c.D)];
  float dO[c.block_rows][tiled_pitch(c, c.Dv)];
  float K[c.block_cols][tiled_pitch(c, c.D)];
  float V[c.block_cols][tiled_pitch(c, c.Dv)];
  float P[c.block_rows][c.block_cols + 4];
  float dS[c.block_rows][c.block_cols + 4];
  float lse2[c.block_rows], delta[c.block_rows];
};

constexpr int tiled_forward_shared_bytes(const Config& c) {
  return 4 * (c.block_rows * (tiled_pitch(c, c.D) + c.block_cols + 8 + 1) +
              c.block_cols * (tiled_pitch(c, c.D) + tiled_pitch(c, c.Dv)));
}
constexpr int tiled_backward_shared_bytes(const Config& c) {
  return 4 * ((c.block_rows + c.block_cols) * (tiled_pitch(c, c.D) + tiled_pitch(c, c.Dv)) +
              c.block_rows * (2 * (c.block_cols + 4) + 2));
}

// --- the tiles of `warp`: block_rows queries; forward, as many keys as a warp has lanes; backward, block_cols keys

constexpr int warp_width(int width) { return int(round_up(width, 32)); }  // a warp's lanes cover a row evenly

// K and V pass through shared memory a tile at a time, of 32 keys and `warp_dims` dims.
inline constexpr int warp_dims = 64;

template <Config c>
struct WarpForwardShared {
  float Q[c.block_rows][padded_to_4(c.D)];
  float tile[32][warp_dims + 4];
};

template <Config c>
struct WarpBackwardShared {
  float Q[c.block_rows][warp_width(c.D)];
  float dO[c.block_rows][warp_width(c.Dv)];
  float dQ[c.threads / 32][c.block_rows][warp_width(c.D)];  // each warp's share
  float lse2[c.block_rows], delta[c.block_rows];
};

constexpr int warp_forward_shared_bytes(const Config& c) {
  return 4 * (c.block_rows * padded_to_4(c.D) + 32 * (warp_dims + 4));
}
constexpr int warp_backward_shared_bytes(const Config& c) {
  return 4 * c.block_rows * (warp_width(c.D) * (1 + c.threads / 32) + warp_width(c.Dv) + 2);
}

}  // namespace tessera::simt
