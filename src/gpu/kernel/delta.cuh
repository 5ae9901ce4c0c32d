// SPDX-License-Identifier: Apache-2.0
// delta = rowsum(dO * O) - dLSE, what every backward pass begins with: a warp per query row. Rows that see no key get
// delta 0 and, in the copy of LSE that the other kernels read, +inf, so that their P = exp(S - LSE) is 0. Device code;
// implements docs/algorithm.md, "Backward, tile by tile".
#pragma once

#include "gpu/kernel/common.cuh"
#include "gpu/kernel/lanes.cuh"

namespace tessera::gpu {

// Query i of a head, by the lanes of one warp. o_element, d_o_element: of O and dO.
template <Element o_element, Element d_o_element, int Dv>
__device__ void prepare_row(const BackwardParams& p, const QueryPlace& place, Int64 i) {
  const int lane = threadIdx.x % 32;
  const Int64 token = place.s.q_begin + i;
  const float lse = *number_of(p.lse, place.b, token, place.h);
  float sum = 0;
  if (lse != minus_infinity<float>) {
    const auto* o = row_of<o_element>(p.o, place.b, token, place.h);
    const auto* d_o = row_of<d_o_element>(p.d_o, place.b, token, place.h);
    for (int d = lane; d < Dv; d += 32) sum = fmaf(to_float(o[d]), to_float(d_o[d]), sum);
    sum = sum_over_lanes<32>(sum);
    if (p.d_lse.data) sum -= *number_of(p.d_lse, place.b, token, place.h);
  }
  if (lane > 0) return;
  const Int64 at = place.h * p.row_head + place.b * p.row_batch + token;
  p.delta[at] = sum;
  p.lse2[at] = lse == minus_infinity<float> ? -minus_infinity<float> : lse * log2e<float>;
}

template <RowConfig config>
__device__ void delta(const BackwardParams& p) {
  QueryPlace place;
  if (!query_place(p.x, config.threads / 32, place)) return;
  const Int64 i = place.first + threadIdx.x / 32;
  if (i < place.s.nq) prepare_row<config.o, config.d_o, config.Dv>(p, place, i);
}

}  // namespace tessera::gpu
