// SPDX-License-Identifier: Apache-2.0
// dSink_h = - sum over sequences and queries of exp(sink_h - LSE_i) delta_i: a block per head, terms dealt out to
// threads and summed in a fixed order, so deterministic. Device code; implements docs/algorithm.md, equation (14).
#pragma once

#include "gpu/kernel/common.cuh"

namespace tessera::gpu {

template <RowConfig config>
__device__ void sink_gradient(const BackwardParams& p) {
  __shared__ double sums[config.threads];
  const Int32 h = Int32(blockIdx.x);
  const float sink = p.x.sinks[h * p.x.sink_head] * log2e<float>;
  double sum = 0;
  for (Int32 b = 0; b < p.x.B; ++b) {
    const DeviceSequence s = sequence_of(p.x, b);
    for (Int64 i = threadIdx.x; i < s.nq; i += config.threads) {
      const Int64 at = h * p.row_head + b * p.row_batch + s.q_begin + i;
      if (p.lse2[at] != -minus_infinity<float>) sum = fma(-double(exp2f(sink - p.lse2[at])), double(p.delta[at]), sum);
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (int half = config.threads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x > 0) return;
  float& out = p.dsinks[h * p.dsink_head];
  out = float(sums[0]) + (p.accumulate ? out : 0);
}

}  // namespace tessera::gpu
