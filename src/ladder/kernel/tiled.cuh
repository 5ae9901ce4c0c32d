// SPDX-License-Identifier: Apache-2.0
// How a block of `tiled` is partitioned over threads: which elements of a tile a thread owns, the two products that
// forward and backward share, and loading K and V. Device code; included by tiled_forward.cuh and tiled_backward.cuh.
#pragma once

#include "ladder/kernel/rows.cuh"

namespace tessera::ladder {

// In every product a thread has one column of the result (and every block_cols-th after it), and several rows.
template <Config config>
struct TiledThread {
  static constexpr int cols = config.block_cols;
  static constexpr int row_step = config.threads / cols, rows = config.block_rows / row_step;

  const int column = threadIdx.x % cols, row0 = threadIdx.x / cols;

  // result[r] = a row (row0 + r row_step) . b row `column`, over D dims.
  template <int D, int pitch>
  __device__ void multiply_over_dims(const float (&a)[config.block_rows][pitch], const float (&b)[cols][pitch],
                                     float (&result)[rows]) const {
    constexpr int width = padded_to_4(D);
#pragma unroll
    for (int r = 0; r < rows; ++r) result[r] = 0;
#pragma unroll 1
    for (int d = 0; d < width; d += longest_chain)
      add_products<row_step * pitch>(&a[row0][d], &b[column][d], int(lesser(longest_chain, width - d)), result);
  }

  // result[r][g] = factor[r] result[r][g] + P row (row0 + r row_step) . column (column + g cols) of b, over the keys.
  template <int P_pitch, int pitch, int groups>
  __device__ void multiply_over_keys(const float (&P)[config.block_rows][P_pitch], const float (&b)[cols][pitch],
                                     const float (&factor)[rows], float (&result)[rows][groups]) const {
#pragma unroll
    for (int g = 0; g < groups; ++g) {
      float part[rows] = {};
#pragma unroll 1
      for (int j = 0; j < cols; j += 4) {
        const float* at = &b[j][column + g * cols];
        const float4 y = {at[0], at[pitch], at[2 * pitch], at[3 * pitch]};
#pragma unroll
        for (int r = 0; r < rows; ++r) {
          const float4 x = four_at(&P[row0 + r * row_step][j]);
          part[r] = fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, part[r]))));
        }
      }
#pragma unroll
      for (int r = 0; r < rows; ++r) result[r][g] = fmaf(factor[r], result[r][g], part[r]);
    }
  }

  // out[d] = row[...] * factor, for the thread's columns of one row.
  template <int D, int groups, class T>
  __device__ void store_row(const float (&row)[groups], float factor, T* out) const {
#pragma unroll
    for (int g = 0; g < groups; ++g)
      if (const int d = column + g * cols; d < D) from_float(row[g] * factor, out[d]);
  }
};

// The tile of K and V that begins at key `first`.
template <Config config, class Shared>
__device__ void load_keys(Shared& shared, const Question& x, const QueryPlace& place, Int64 first) {
  const Int64 left = place.s.nk - first;
  const auto is_used = [&](int r) { return r < left; };
  load_rows<config, tiled_width(config, config.D)>(shared.K, key_tile<config.element>(x.k, place, first), config.D,
                                                   is_used);
  load_rows<config, tiled_width(config, config.Dv)>(shared.V, key_tile<config.element>(x.v, place, first), config.Dv,
                                                    is_used);
}

}  // namespace tessera::ladder
