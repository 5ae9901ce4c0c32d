// SPDX-License-Identifier: Apache-2.0
// What CUDA C++ has and C++ has not: words, the numbers of threads and blocks, vectors of four. Included by
// tests/emulated/machine.hpp.
#pragma once

#define __host__
#define __device__
#define __shared__
#define __align__(bytes) __attribute__((aligned(bytes)))

struct ThreadPlace {  // unsigned, as there: what an int becomes beside it is the same
  unsigned x = 0;
};
inline ThreadPlace threadIdx, blockIdx, gridDim;

// Aligned as there, so that the compiler may use instructions that ask for it, and UBSan asks.
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
