// SPDX-License-Identifier: Apache-2.0
// Rows in shared memory: loads, dot products, warp reductions, and the online softmax of a row. Device code; included
// by tiled_*.cuh and warp_*.cuh.
#pragma once

#include "gpu/kernel/common.cuh"
#include "gpu/kernel/lanes.cuh"
#include "ladder/config.hpp"
#include "math/compensated.hpp"

namespace tessera::ladder {

// The most terms that go into one accumulator. Longer sums drift when their terms have one sign (docs/numerics.md,
// "Where rounding happens"), so they are made of partial sums.
inline constexpr int longest_chain = 64;

__device__ inline float4 four_at(const float* p) { return *reinterpret_cast<const float4*>(p); }

// Indices of the tiles of `size` rows that overlap a range.
__device__ inline Range tiles_of(Range range, Int64 size) {
  return range.empty() ? Range{} : Range{range.begin / size, ceil_div(range.end, size)};
}

// The mask relative to a tile whose first query and key are i0 and j0.
struct TileMask : Diagonals {
  int keys;
  __device__ TileMask(const BandMask& mask, Int64 i0, Int64 j0) :
      Diagonals(mask, i0, j0), keys(int(clamp(mask.keys - j0, -far, far))) {}
  __device__ bool visible(int i, int j) const { return j < keys && low <= j - i && j - i <= high; }
};

// to[r][d] = row r of `from`, element d, times factor, for d < width; 0 beyond `dims` and in rows that are not used.
template <Config config, int width, int rows, int pitch, Element element, class Used>
__device__ inline void load_rows(float (&to)[rows][pitch], const TileRows<element>& from, int dims, Used is_used,
                                 float factor = 1) {
  constexpr int batch = 4;  // loads in flight per thread
#pragma unroll 1
  for (int first = threadIdx.x; first < rows * width; first += batch * config.threads) {
    float values[batch];
#pragma unroll
    for (int e = 0; e < batch; ++e) {
      const int n = first + e * config.threads, r = n / width, d = n % width;
      values[e] = r < rows && d < dims && is_used(r) ? to_float(from.first[r * from.distance + d]) * factor : 0.0f;
    }
#pragma unroll
    for (int e = 0; e < batch; ++e) {
      const int n = first + e * config.threads, r = n / width, d = n % width;
      if (r < rows) to[r][d] = values[e];
    }
  }
}

// sum[n] += a row n . b, over `width` floats (a multiple of 4), as one partial sum. Rows of a are `distance` floats
// apart.
template <int distance, int rows>
__device__ inline void add_products(const float* a, const float* b, int width, float (&sum)[rows]) {
  float part[rows] = {};
#pragma unroll 2
  for (int d = 0; d < width; d += 4) {
    const float4 y = four_at(b + d);
#pragma unroll
    for (int n = 0; n < rows; ++n) {
      const float4 x = four_at(a + n * distance + d);
      part[n] = fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, part[n]))));
    }
  }
#pragma unroll
  for (int n = 0; n < rows; ++n) sum[n] += part[n];
}

// Online softmax of a row: the running maximum m, and the sum l of exponentials relative to it. Kahan summation: a
// plain sum of thousands of equal terms would drift.
struct SoftmaxRow {
  float m = minus_infinity<float>, l = 0, lost = 0;

  // Updates m for a tile whose largest score is `top`. Returns the rescaling factor alpha of everything that was summed
  // so far.
  __device__ float raise(float top) {
    const float before = m;
    m = fmaxf(m, top);
    const float alpha = exp2f(before - exponent_base(m));
    l *= alpha, lost *= alpha;
    return alpha;
  }
  __device__ float P(float S) const { return exp2f(S - exponent_base(m)); }
  __device__ void add(float sum) { add_compensated(l, lost, sum); }

  __device__ float inverse() const { return l == 0 ? 0 : 1 / l; }
  // In double: m and log2(l) may each be rounded by more than LSE may be off.
  __device__ float lse() const { return natural_lse(m, l); }
};

}  // namespace tessera::ladder
