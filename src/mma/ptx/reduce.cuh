// SPDX-License-Identifier: Apache-2.0
// Sums and counts in global memory that many blocks add to, and barriers of two warps. Thin: one function, one
// instruction of the PTX ISA, whose section each comment names. Device code.
#pragma once

#include "math/types.hpp"

namespace tessera::mma {

// "red": adds four numbers of each lane, 512 bytes of a warp, to those at `part`. From sm_90 on four neighbouring ones
// of a lane in one instruction; before, each instruction takes 128 bytes. `store_sums` and the reader lay them out so,
// too.
__device__ inline void add_sums(float* part, int lane, const float* x) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(part + 4 * lane), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
#else
#pragma unroll
  for (int n = 0; n < 4; ++n)
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(part + 32 * n + lane), "f"(x[n]) : "memory");
#endif
}
__device__ inline void store_sums(float* part, int lane, const float* x) {
#if __CUDA_ARCH__ >= 900
  *reinterpret_cast<float4*>(part + 4 * lane) = float4{x[0], x[1], x[2], x[3]};
#else
#pragma unroll
  for (int n = 0; n < 4; ++n) part[32 * n + lane] = x[n];
#endif
}
__device__ inline void load_sums(const float* part, int lane, float* x) {
#if __CUDA_ARCH__ >= 900
  const float4 four = *reinterpret_cast<const float4*>(part + 4 * lane);
  x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
#else
#pragma unroll
  for (int n = 0; n < 4; ++n) x[n] = part[32 * n + lane];
#endif
}

// "ld.relaxed": a count as it is now. What others wrote before they counted is visible after a fence.
__device__ inline UInt32 look_at_count(const UInt32* count) {
  UInt32 now;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(count) : "memory");
  return now;
}
// "ld.acquire": until the count is `value`. What others wrote before they counted is then visible.
__device__ inline void wait_for_count(const UInt32* count, UInt32 value) {
  UInt32 now;
  do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(count) : "memory");
  while (now != value);
}
// "fence", then "red": counts one more, after everything that this thread has seen written.
__device__ inline void fence_counts() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ inline void count_behind_fence(UInt32* count) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory");
}

// "bar.arrive", "bar.sync": two warps that share barrier `name`. One says that it has come, the other waits for it;
// what the first wrote before is then visible.
__device__ inline void arrive_at_pair(int name) { asm volatile("bar.arrive %0, 64;" ::"r"(name) : "memory"); }
__device__ inline void wait_for_pair(int name) { asm volatile("bar.sync %0, 64;" ::"r"(name) : "memory"); }

}  // namespace tessera::mma
