// The two products of `vector`, blocked in registers: over dims (S = Q K^T and its kin) and over a tile's columns (O =
// P V and its kin). 16 lanes share each row. Device text; included by vector_forward.cuh and vector_backward.cuh.
#pragma once

#include "simt/kernel/tile.cuh"

namespace tessera::simt {

// result[r][c] = A row (row0 + r) . B row (lane + 16 c), over `width` dims. Chains of additions longer than 64 drift
// when the terms have one sign (docs/numerics.md), so longer ones are summed in pieces.
template <int width, int rows, int cols, class A, class B>
__device__ inline void multiply_over_dims(const A& a, const B& b, int row0, int lane, float (&result)[rows][cols]) {
  constexpr int chain = 64;
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
      for (int c = 0; c < cols; ++c) column[c] = load4(&b[lane + lanes_per_row * c][d]);
#pragma unroll
      for (int r = 0; r < rows; ++r) {
        const float4 row = load4(&a[row0 + r][d]);
#pragma unroll
        for (int c = 0; c < cols; ++c) part[r][c] = dot4(row, column[c], part[r][c]);
      }
    }
#pragma unroll
    for (int r = 0; r < rows; ++r)
#pragma unroll
      for (int c = 0; c < cols; ++c) result[r][c] += part[r][c];
  }
}

__device__ inline void add_scaled(float (&sum)[4], float p, float4 v) {
  sum[0] = fmaf(p, v.x, sum[0]), sum[1] = fmaf(p, v.y, sum[1]);
  sum[2] = fmaf(p, v.z, sum[2]), sum[3] = fmaf(p, v.w, sum[3]);
}

// result = factor * result + P B, where P is [rows][depth] and B [depth][64 groups]; lane n has columns 4 n .. 4 n + 3
// of every group. One chain per tile.
template <int depth, int rows, int columns, class P, class B>
__device__ inline void multiply_over_columns(const P& p, const B& b, int row0, int lane, const float (&factor)[rows],
                                             float (&result)[rows][columns]) {
#pragma unroll
  for (int g = 0; g < columns / 4; ++g) {
    float part[rows][4] = {};
#pragma unroll 2
    for (int j = 0; j < depth; j += 4) {
      float4 v[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) v[e] = load4(&b[j + e][4 * (lane + lanes_per_row * g)]);
#pragma unroll
      for (int r = 0; r < rows; ++r) {
        const float4 w = load4(&p[row0 + r][j]);
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

// Row r of a result goes to (or, accumulating, is added to) an output row, times `factor`.
template <int width, int columns, class T>
__device__ inline void store_row(const float (&row)[columns], int lane, float factor, bool accumulate, T* out) {
#pragma unroll
  for (int n = 0; n < columns; ++n) {
    const int d = 4 * (lane + lanes_per_row * (n / 4)) + n % 4;
    if (d < width) from_float(row[n] * factor + (accumulate ? to_float(out[d]) : 0.0f), out[d]);
  }
}

}  // namespace tessera::simt
