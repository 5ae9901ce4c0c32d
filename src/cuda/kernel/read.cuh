// SPDX-License-Identifier: Apache-2.0
// A kernel that only reads: the limit that attention over a cache is measured against. Neighbouring threads load
// neighbouring chunks, and each has several loads on their way. Device code; docs/benchmarks.md, "Method".
#pragma once

#include "cuda/read_params.hpp"

namespace tessera::cuda {

// Both ranges as one. Beyond their end: nothing is loaded.
__device__ inline uint4 chunk_at(const ReadParams& p, Int64 n) {
  if (n < p.chunks[0]) return __ldcg(static_cast<const uint4*>(p.from[0]) + n);
  n -= p.chunks[0];
  return n < p.chunks[1] ? __ldcg(static_cast<const uint4*>(p.from[1]) + n) : uint4{0, 0, 0, 0};
}

__device__ inline void read(const ReadParams& p) {
  const Int64 step = Int64(gridDim.x) * read_threads, end = p.chunks[0] + p.chunks[1];
  UInt32 sum = 0;  // so that the compiler keeps every load
#pragma unroll 1
  for (Int64 first = Int64(blockIdx.x) * read_threads + threadIdx.x; first < end; first += read_at_once * step) {
    uint4 x[read_at_once];
#pragma unroll
    for (int n = 0; n < read_at_once; ++n) x[n] = chunk_at(p, first + n * step);
#pragma unroll
    for (int n = 0; n < read_at_once; ++n) sum ^= x[n].x ^ x[n].y ^ x[n].z ^ x[n].w;
  }
  if (sum == p.wanted) atomicAdd(p.found, 1u);
}

}  // namespace tessera::cuda
