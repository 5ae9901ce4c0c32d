// SPDX-License-Identifier: Apache-2.0
// Sums and maxima over neighbouring lanes of a warp, by butterfly exchange: every lane ends with the same bits. Device
// text; included by every kernel whose lanes share a row.
#pragma once

#include "math/types.hpp"

namespace tessera::gpu {

// Several numbers take each step together, because a step must wait for the one before it. Far lanes first.
template <int lanes, int count, class Number>
__device__ inline void sum_over_lanes(Number (&x)[count]) {
#pragma unroll
  for (int distance = lanes / 2; distance > 0; distance /= 2)
#pragma unroll
    for (int n = 0; n < count; ++n) x[n] += __shfl_xor_sync(0xffffffffu, x[n], distance);
}
template <int lanes, int count>
__device__ inline void max_over_lanes(float (&x)[count]) {
#pragma unroll
  for (int distance = lanes / 2; distance > 0; distance /= 2)
#pragma unroll
    for (int n = 0; n < count; ++n) x[n] = fmaxf(x[n], __shfl_xor_sync(0xffffffffu, x[n], distance));
}

template <int lanes, class Number>
__device__ inline Number sum_over_lanes(Number x) {
  Number one[1] = {x};
  sum_over_lanes<lanes>(one);
  return one[0];
}
template <int lanes>
__device__ inline float max_over_lanes(float x) {
  float one[1] = {x};
  max_over_lanes<lanes>(one);
  return one[0];
}

// The four lanes that share a row of a Hopper accumulator. Near lanes first: another order would be other bits.
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

}  // namespace tessera::gpu
