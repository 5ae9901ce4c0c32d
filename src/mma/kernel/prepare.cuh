// SPDX-License-Identifier: Apache-2.0
// What the `mma` one-pass backward kernel begins with: delta = rowsum(dO * O) - dLSE, LSE in units of log2(e), and
// zeros where it will count and add. Rows that see no key get delta 0 and LSE +inf, so that their P = exp(S - LSE) is
// 0. A few lanes per row, 8 columns each. Device code; implements docs/algorithm.md, "Backward, tile by tile".
#pragma once

#include "gpu/kernel/common.cuh"
#include "gpu/kernel/lanes.cuh"
#include "mma/one_pass_config.hpp"
#include "mma/params.hpp"

namespace tessera::mma {

// Elements `first` to `first` + 7 of a row; 0 from `count` on.
template <Element element, bool aligned>
__device__ inline void load_eight(const typename gpu::Stored<element>::Type* row, int first, int count, float (&x)[8]) {
  if (aligned && first + 8 <= count) {
    constexpr int words = element == Element::f32 ? 8 : 4;
    UInt32 bits[words];
#pragma unroll
    for (int n = 0; n < words; n += 4) {
      const uint4 four = reinterpret_cast<const uint4*>(row + first)[n / 4];
      bits[n] = four.x, bits[n + 1] = four.y, bits[n + 2] = four.z, bits[n + 3] = four.w;
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) x[n] = gpu::unpacked<element>(bits[n * words / 8] >> (words == 4 ? n % 2 * 16 : 0));
  } else {
#pragma unroll
    for (int n = 0; n < 8; ++n) x[n] = first + n < count ? gpu::to_float(row[first + n]) : 0;
  }
}

template <PrepareConfig config>
__device__ void prepare(const PrepareParams& p) {
  const Int64 thread = blockIdx.x * Int64(prepare_threads) + threadIdx.x, threads = gridDim.x * Int64(prepare_threads);
  for (Int64 n = thread; n < p.zeros; n += threads) static_cast<uint4*>(p.zero)[n] = uint4{0, 0, 0, 0};

  gpu::QueryPlace place;
  if (!gpu::query_place(p.call.x, prepare_queries, place)) return;
  constexpr int at_once = prepare_threads / config.lanes, rounds = prepare_queries / at_once;
  const int lane = threadIdx.x % config.lanes, row = threadIdx.x / config.lanes;
  float sum[rounds] = {}, lse[rounds];
#pragma unroll
  for (int r = 0; r < rounds; ++r) {  // no round waits for the one before
    const Int64 i = place.first + row + r * at_once, token = place.s.q_begin + i;
    lse[r] = minus_infinity<float>;
    if (i >= place.s.nq) continue;
    lse[r] = *gpu::number_of(p.call.lse, place.b, token, place.h);
    float x[8], y[8];
    load_eight<config.o, config.aligned>(gpu::row_of<config.o>(p.call.o, place.b, token, place.h), 8 * lane, p.Dv, x);
    load_eight<config.d_o, config.aligned>(gpu::row_of<config.d_o>(p.call.d_o, place.b, token, place.h), 8 * lane, p.Dv,
                                           y);
#pragma unroll
    for (int n = 0; n < 8; ++n) sum[r] = fmaf(x[n], y[n], sum[r]);
  }
#pragma unroll
  for (int r = 0; r < rounds; ++r) {
    sum[r] = gpu::sum_over_lanes<config.lanes>(sum[r]);
    const Int64 i = place.first + row + r * at_once, token = place.s.q_begin + i;
    if (lane > 0 || i >= place.s.nq) continue;
    const bool sees = lse[r] != minus_infinity<float>;
    const float d_lse = sees && p.call.d_lse.data ? *gpu::number_of(p.call.d_lse, place.b, token, place.h) : 0;
    const Int64 at = place.h * p.call.row_head + place.b * p.call.row_batch + token;
    p.call.delta[at] = sees ? sum[r] - d_lse : 0;
    p.call.lse2[at] = sees ? lse[r] * log2e<float> : -minus_infinity<float>;
  }
}

}  // namespace tessera::mma
