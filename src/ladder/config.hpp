// SPDX-License-Identifier: Apache-2.0
// Compile-time configuration of the ladder's kernels, and their layouts of shared memory. A Config is the template
// argument of a kernel; the host writes it into the generated unit. Lengths, strides, scale and window widths are
// run-time parameters (Params), so that a new value compiles no new kernel. Included by host and device code.
#pragma once

#include "gpu/config.hpp"

namespace tessera::ladder {

using namespace gpu;  // the layer below

struct Config {
  int threads = 128;
  int D = 64, Dv = 64;
  Element element = Element::f32;  // q, k, v
  Element o = Element::f32, d_o = Element::f32;
  Element dq = Element::f32, dk = Element::f32, dv = Element::f32;  // `vector`: none where this launch omits it
  Element dbias = Element::none;

  // Tile shape, of all rungs but `naive`, and the options that specialise `vector`: an option that is off generates no
  // code. Rows of a tile are what a thread block owns (queries, or the keys whose gradients it computes). Columns are
  // what it streams through shared memory.
  int block_rows = 0, block_cols = 0, rows_per_thread = 0;
  int stages = 1;             // buffers for tiles of columns; 2: double buffering, the next tile is prefetched
  int blocks_per_sm = 1;      // occupancy to compile for: __launch_bounds__ limits registers to it
  bool tensor_cores = false;  // products by TF32 mma, f32 operands split in two (3xTF32); otherwise by FMA
  bool wide_loads = false;    // rows are aligned to 16 bytes: vector loads
  bool own_delta = false;     // the dQ kernel computes delta and LSE, also for later kernels: saves a launch
  ScoreConfig options{};

  constexpr bool operator==(const Config&) const = default;
};

constexpr int greater_of(int a, int b) { return a > b ? a : b; }

// --- the tiles of `vector`

// How products are partitioned over threads. FMA: 16 lanes share a row of a tile; each group of 64 result columns gives
// every lane four neighbours. Tensor cores: 4 lanes share a row, as in an mma fragment, and groups have 32 columns.
inline constexpr int fma_lanes = 16, tensor_lanes = 4;
constexpr int group_columns(const Config& c) { return c.tensor_cores ? 32 : 64; }

// Floats in a row of a tile in shared memory: `width` dims, zero-padded to whole groups. The pitch, from row to row, is
// 4 floats longer: this padding puts the rows that a warp reads at once into different banks (no bank conflicts).
constexpr int tile_width(const Config& c, int width) { return int(round_up(width, group_columns(c))); }
constexpr int tile_pitch(const Config& c, int width) { return tile_width(c, width) + 4; }

template <Config c>
struct VectorForwardShared {
  float Q[c.block_rows][tile_pitch(c, c.D)];
  float K[c.stages][c.block_cols][tile_pitch(c, c.D)];
  float V[c.stages][c.block_cols][tile_pitch(c, c.Dv)];
  float P[c.block_rows][c.block_cols + 4];  // staging: the result of one product becomes the operand of the next
};

// Shared memory of the backward kernels. Operands of the block's own rows stay, those of the columns are streamed. On
// either side QK is the one of q and k that lies there, and VO the one of v and dO: S = row_QK column_QK^T and
// dP = row_VO column_VO^T. LSE and delta are per query, so per row or per column.
template <Config c>
struct VectorBackwardShared {
  float row_QK[c.block_rows][tile_pitch(c, c.D)];
  float row_VO[c.block_rows][tile_pitch(c, c.Dv)];
  float column_QK[c.stages][c.block_cols][tile_pitch(c, c.D)];
  float column_VO[c.stages][c.block_cols][tile_pitch(c, c.Dv)];
  float P[c.block_rows][c.block_cols + 4];
  float lse2[c.stages][greater_of(c.block_rows, c.block_cols)], delta[c.stages][greater_of(c.block_rows, c.block_cols)];
};

// The same sizes for the planner, which knows the configuration at run time only. The kernels static_assert that they
// agree.
constexpr int vector_forward_shared_bytes(const Config& c) {
  return 4 * (c.block_rows * tile_pitch(c, c.D) + c.stages * c.block_cols * (tile_pitch(c, c.D) + tile_pitch(c, c.Dv)) +
              c.block_rows * (c.block_cols + 4));
}
constexpr int vector_backward_shared_bytes(const Config& c) {
  return 4 * ((c.block_rows + c.stages * c.block_cols) * (tile_pitch(c, c.D) + tile_pitch(c, c.Dv)) +
              c.block_rows * (c.block_cols + 4) + 2 * c.stages * greater_of(c.block_rows, c.block_cols));
}

// --- the tiles of `tiled`: block_rows queries by block_cols keys

// Rows in shared memory are zero-padded, so that threads with a column each cover them evenly. The pitch is 4 floats
// longer: neighbouring rows, which lanes read as float4, then fall into different banks.
constexpr int tiled_width(const Config& c, int width) { return int(round_up(width, c.block_rows)); }
constexpr int tiled_pitch(const Config& c, int width) { return tiled_width(c, width) + 4; }

template <Config c>
struct TiledForwardShared {
  float Q[c.block_rows][tiled_pitch(c, c.D)];
  float K[c.block_cols][tiled_pitch(c, c.D)];
  float V[c.block_cols][tiled_pitch(c, c.Dv)];
  float S[c.block_rows][c.block_cols + 8];  // scores, then P; padded: groups of 8 lanes read a row each
  float factor[c.block_rows];               // of the rows of O: online softmax's alpha, in the end 1 / l
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

// K and V are staged through one buffer in shared memory: 32 keys by `warp_dims` dims at a time.
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
  float dQ[c.threads / 32][c.block_rows][warp_width(c.D)];  // partial sums of each warp
  float lse2[c.block_rows], delta[c.block_rows];
};

constexpr int warp_forward_shared_bytes(const Config& c) {
  return 4 * (c.block_rows * padded_to_4(c.D) + 32 * (warp_dims + 4));
}
constexpr int warp_backward_shared_bytes(const Config& c) {
  return 4 * c.block_rows * (warp_width(c.D) * (1 + c.threads / 32) + warp_width(c.Dv) + 2);
}

}  // namespace tessera::ladder
