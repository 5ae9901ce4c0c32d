// SPDX-License-Identifier: Apache-2.0
// The products of `vector` by FMA with register blocking: 16 lanes share a row, a thread has several rows. For GPUs
// without TF32 tensor cores, for head dims beyond 256, and as the accuracy baseline of the tensor-core products. Device
// text; included by product.cuh, which says what a product must offer.
#pragma once

#include "ladder/kernel/tile.cuh"

namespace tessera::ladder {

__device__ inline float dot4(float4 a, float4 b, float sum) {
  sum = fmaf(a.x, b.x, sum);
  sum = fmaf(a.y, b.y, sum);
  sum = fmaf(a.z, b.z, sum);
  return fmaf(a.w, b.w, sum);
}

__device__ inline void add_scaled(float (&sum)[4], float p, float4 v) {
  sum[0] = fmaf(p, v.x, sum[0]), sum[1] = fmaf(p, v.y, sum[1]);
  sum[2] = fmaf(p, v.z, sum[2]), sum[3] = fmaf(p, v.w, sum[3]);
}

template <Config config>
struct FmaProduct {
  static constexpr int lanes = fma_lanes;
  static constexpr int rows = config.rows_per_thread, cols = config.block_cols / lanes;
  static_assert(config.block_rows == config.threads / lanes * rows);

  const int row0 = threadIdx.x / lanes * rows, lane = threadIdx.x % lanes;

  __device__ int row(int r) const { return row0 + r; }
  __device__ static constexpr int col_offset(int c) { return lanes * c; }
  __device__ int col(int c) const { return lane + col_offset(c); }
  __device__ int out_col(int n) const { return 4 * (lane + lanes * (n / 4)) + n % 4; }

  // Partial sums of 64 terms: one accumulator for a longer sum drifts when the terms have one sign (docs/numerics.md).
  template <int D, Element, Element, class A, class B>
  __device__ void over_dims(const A& a, const B& b, float (&result)[rows][cols]) const {
    constexpr int chain = 64, width = padded_to_4(D);
#pragma unroll
    for (int r = 0; r < rows; ++r)
#pragma unroll
      for (int c = 0; c < cols; ++c) result[r][c] = 0;
#pragma unroll 1
    for (int begin = 0; begin < width; begin += chain) {
      float part[rows][cols] = {};
      const int end = begin + chain < width ? begin + chain : width;
#pragma unroll 2
      for (int d = begin; d < end; d += 4) {
        float4 column[cols];
#pragma unroll
        for (int c = 0; c < cols; ++c) column[c] = load4(&b[col(c)][d]);
#pragma unroll
        for (int r = 0; r < rows; ++r) {
          const float4 values = load4(&a[row(r)][d]);
#pragma unroll
          for (int c = 0; c < cols; ++c) part[r][c] = dot4(values, column[c], part[r][c]);
        }
      }
#pragma unroll
      for (int r = 0; r < rows; ++r)
#pragma unroll
        for (int c = 0; c < cols; ++c) result[r][c] += part[r][c];
    }
  }

  // P goes through shared memory (`scratch`) to reach the other lanes. A row is written and read by the same half warp,
  // so __syncwarp() is enough. One partial sum per tile.
  template <Element, class Scratch, class B, int outs>
  __device__ void over_columns(const float (&p)[rows][cols], Scratch& scratch, const B& b, const float (&factor)[rows],
                               float (&result)[rows][outs]) const {
    __syncwarp();
#pragma unroll
    for (int r = 0; r < rows; ++r)
#pragma unroll
      for (int c = 0; c < cols; ++c) scratch[row(r)][col(c)] = p[r][c];
    __syncwarp();
#pragma unroll
    for (int g = 0; g < outs / 4; ++g) {
      float part[rows][4] = {};
#pragma unroll 2
      for (int j = 0; j < config.block_cols; j += 4) {
        float4 v[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) v[e] = load4(&b[j + e][out_col(4 * g)]);
#pragma unroll
        for (int r = 0; r < rows; ++r) {
          const float4 w = load4(&scratch[row(r)][j]);
          add_scaled(part[r], w.x, v[0]), add_scaled(part[r], w.y, v[1]);
          add_scaled(part[r], w.z, v[2]), add_scaled(part[r], w.w, v[3]);
        }
      }
#pragma unroll
      for (int r = 0; r < rows; ++r)
#pragma unroll
        for (int d = 0; d < 4; ++d) result[r][4 * g + d] = fmaf(result[r][4 * g + d], factor[r], part[r][d]);
    }
  }
};

}  // namespace tessera::ladder
