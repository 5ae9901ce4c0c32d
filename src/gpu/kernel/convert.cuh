// SPDX-License-Identifier: Apache-2.0
// The end of a backward pass that sums in the workspace: the copies of a sum are added in their order, multiplied
// (dQ and dK by the scale) and written as the gradient, in its type and layout: a warp per row and head. Rows that no
// sequence uses are left to `clear`. Device code; implements docs/algorithm.md, "Backward, tile by tile".
#pragma once

#include "gpu/kernel/common.cuh"

namespace tessera::gpu {

template <int D, class T>
__device__ inline void convert_row(const Sum& sum, Int64 row, float factor, T* out) {
  for (int d = threadIdx.x % 32; d < D; d += 32) {
    const float* at = sum.data + row * padded_to_4(D) + d;
    float total = 0;
    for (Int32 n = 0; n < sum.copies; ++n) total += at[n * sum.copy];
    from_float(total * factor, out[d]);
  }
}

template <RowConfig config>
__device__ void convert_queries(const BackwardParams& p) {
  QueryPlace place;
  if (!query_place(p.x, config.threads / 32, place)) return;
  const Int64 i = place.first + threadIdx.x / 32, token = place.s.q_begin + i;
  if (i >= place.s.nq) return;
  const Int64 row = place.h * p.row_head + place.b * p.row_batch + token;
  if (p.dq_sum.data) convert_row<config.D>(p.dq_sum, row, p.x.scale, row_of<config.dq>(p.dq, place.b, token, place.h));
}

template <RowConfig config>
__device__ void convert_keys(const BackwardParams& p) {
  QueryPlace place;
  if (!key_place(p.x, config.threads / 32, place)) return;
  const Int64 j = place.first + threadIdx.x / 32, token = place.s.k_begin + j;
  if (j >= place.s.nk) return;
  const Int64 row = place.kv * p.key_head + place.b * p.key_batch + token;
  if (p.dk_sum.data) convert_row<config.D>(p.dk_sum, row, p.x.scale, row_of<config.dk>(p.dk, place.b, token, place.kv));
  if (p.dv_sum.data) convert_row<config.Dv>(p.dv_sum, row, 1, row_of<config.dv>(p.dv, place.b, token, place.kv));
}

}  // namespace tessera::gpu
