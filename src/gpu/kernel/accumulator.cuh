// SPDX-License-Identifier: Apache-2.0
// Accumulators of 16 rows per warp: the band of the mask, and the way to memory. Every thread has two rows, each shared
// by four neighbouring lanes; value n belongs to row n / 2 % 2. Device code.
#pragma once

#include "gpu/kernel/common.cuh"
#include "gpu/kernel/math.cuh"
#include "gpu/kernel/quad.cuh"
#include "gpu/layout.hpp"

namespace tessera::gpu {

// Row r of the tile sees the columns from low + r to high + r, but none from `columns` on. What that is of one of a
// thread's two rows, counted from the thread's own first column; `thread` of the warpgroup.
struct SeenColumns {
  Int32 first, last;
};
__device__ inline SeenColumns seen_columns(int thread, int r, Int32 low, Int32 high, Int32 columns) {
  const Int32 row = accumulator_row(thread, 0), column = accumulator_column(thread, 0);
  const Int32 seen = high + row + 8 * r;
  return {low + row + 8 * r - column, (seen < columns ? seen : columns - 1) - column};
}

// The scores of what is not seen become -inf.
template <int n>
__device__ inline void hide(float (&S)[n / 2], int thread, Int32 low, Int32 high, Int32 columns) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const SeenColumns seen = seen_columns(thread, r, low, high, columns);
#pragma unroll
    for (int c = 2 * r; c < n / 2; c += 4)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (c / 4 * 8 + e < seen.first || c / 4 * 8 + e > seen.last) S[c + e] = minus_infinity<float>;
  }
}

// A thread's two rows, each times its factor.
template <int values>
__device__ inline void scale_rows(float (&d)[values], float first, float second) {
#pragma unroll
  for (int n = 0; n < values; ++n) d[n] *= n / 2 % 2 == 0 ? first : second;
}

// One of a thread's two rows, r, to memory; `count` columns of the accumulator's n exist. All lanes of a quad call it
// together; `exists`: the row is one to write.
template <Element element, int n>
__device__ inline void store_row(const float (&d)[n / 2], int r, int thread, typename Stored<element>::Type* to,
                                 int count, bool exists) {
  if constexpr (element == Element::f32) {
#pragma unroll
    for (int v = 0; v < n / 2; v += 4)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (const int column = accumulator_column(thread, v + e); exists && column < count)
          to[column] = d[v + 2 * r + e];
  } else {
#pragma unroll
    for (int k = 0; k < (n + 31) / 32; ++k) {
      const int column = 32 * k + thread % 4 * 8;
      UInt32 x[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int v = 16 * k + 4 * c + 2 * r;
        x[c] = v < n / 2 ? packed<element>(d[v], d[v + 1]) : 0;
      }
      transpose_in_quad(x);  // from two columns of every eight to eight of one
      if (exists && column < count) store_columns(to + column, x, count - column);
    }
  }
}

// What memory holds of that row, added to it.
template <int n>
__device__ inline void add_row(float (&d)[n / 2], int r, int thread, const float* from, int count, bool exists) {
#pragma unroll
  for (int v = 0; v < n / 2; v += 4)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (const int column = accumulator_column(thread, v + e); exists && column < count)
        d[v + 2 * r + e] += from[column];
}

}  // namespace tessera::gpu
