// SPDX-License-Identifier: Apache-2.0
// Merge: a warp per row, in float64 and in the order of the parts, as src/cpu/merge.cpp does it: what the partial
// results were rounded to is all that may show. A row is read in every part before it is written, so that a result may
// replace a part. Device code; implements docs/algorithm.md, "Merge".
#pragma once

#include "gpu/kernel/common.cuh"
#include "gpu/merge_params.hpp"
#include "math/odd.hpp"

namespace tessera::gpu {

struct MergeExp {
  __device__ double operator()(double x) const { return exp(x); }
};

__device__ inline double number_at(const void* data, Element type, Int64 at) {
  if (type == Element::f16) return widen(static_cast<const F16*>(data)[at]);
  if (type == Element::bf16) return widen(static_cast<const BF16*>(data)[at]);
  return static_cast<const float*>(data)[at];
}
__device__ inline void put_number(void* data, Element type, Int64 at, double x) {
  if (type == Element::f16)
    static_cast<F16*>(data)[at] = narrow<F16>(to_f32_odd(x));
  else if (type == Element::bf16)
    static_cast<BF16*>(data)[at] = narrow<BF16>(to_f32_odd(x));
  else
    static_cast<float*>(data)[at] = float(x);
}

// All lanes of a warp. Lane n keeps the weights of parts n and n + 32.
__device__ inline void merge_row(const MergeParams& p, Int64 row) {
  static_assert(most_parts <= 64);
  const int lane = threadIdx.x % 32;
  const Int64 h = row % p.H, i = row / p.H % p.tokens, b = row / p.H / p.tokens;
  const auto lse_of = [&](int k) -> double { return *number_of(p.parts[k].lse, b, i, h); };
  const auto o_at = [&](const MergePart& part) { return b * part.o.batch + i * part.o.token + h * part.o.head; };
  double m = minus_infinity<double>, l = 0;
  for (int k = 0; k < p.count; ++k)
    if (const double x = lse_of(k); x > m || x != x) m = x;
  for (int k = 0; k < p.count; ++k) l += merge_weight(lse_of(k), m, MergeExp{});
  const double lse = log_sum_exp(m, l, [](double x) { return log(x); });
  const double low = lane < p.count ? merge_weight(lse_of(lane), lse, MergeExp{}) : 0;
  const double high = lane + 32 < p.count ? merge_weight(lse_of(lane + 32), lse, MergeExp{}) : 0;

  for (int first = 0; first < p.width; first += 32) {
    const int d = first + lane;
    double sum = 0;
    for (int k = 0; k < p.count; ++k) {
      const double weight = k < 32 ? __shfl_sync(0xffffffffu, low, k) : __shfl_sync(0xffffffffu, high, k - 32);
      if (weight == 0 || d >= p.width) continue;  // a part that saw nothing may hold anything
      sum += weight * number_at(p.parts[k].o.data, p.parts[k].type, o_at(p.parts[k]) + d);
    }
    if (d < p.width) put_number(p.merged.o.data, p.merged.type, o_at(p.merged) + d, sum);
  }
  __syncwarp();  // all lanes have read every LSE: the merged one may be one of them
  if (lane == 0 && p.merged.lse.data) *number_of(p.merged.lse, b, i, h) = float(lse);
}

__device__ inline void merge(const MergeParams& p) {
  constexpr int warps = merge_threads / 32;
  for (Int64 n = Int64(blockIdx.x) * warps + threadIdx.x / 32; n < p.rows(); n += Int64(gridDim.x) * warps)
    merge_row(p, n);
}

}  // namespace tessera::gpu
