// SPDX-License-Identifier: Apache-2.0
// Copies from global to shared memory (cp.async), and addresses in shared memory. Thin: one function, one instruction
// of the PTX ISA, whose section each comment names. Device code.
#pragma once

#include "math/types.hpp"

namespace tessera::gpu {

__device__ inline UInt32 shared_address(const void* p) { return UInt32(__cvta_generic_to_shared(p)); }

// "cp.async": `size` bytes, of which the first `bytes` come from memory and the others are 0. Asynchronous: it has
// arrived after a wait for its group.
template <int size>
__device__ inline void copy_async(UInt32 to, const void* from, int bytes) {
  static_assert(size == 16 || size == 8 || size == 4);
#if __CUDA_ARCH__ >= 800
  if constexpr (size == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(size), "r"(bytes)
                 : "memory");
#endif
}
// "cp.async.commit_group": what this thread has issued since the last one.
__device__ inline void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// "cp.async.wait_group": until at most the latest `pending` groups of this thread are on their way.
template <int pending>
__device__ inline void wait_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#endif
}

// "st.shared": 16 bytes.
__device__ inline void store_chunk(UInt32 to, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// "ld.shared", "st.shared": four or two f32 numbers side by side, and pairs of 16-bit ones.
__device__ inline void store_four(UInt32 to, const float* x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}
__device__ inline void load_four(UInt32 from, float (&x)[4]) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "r"(from)
               : "memory");
}
__device__ inline void load_two(UInt32 from, float (&x)[2]) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(from) : "memory");
}
__device__ inline void store_pair(UInt32 to, UInt32 x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

// "st.shared", "ld.shared": numbers of 4 bytes.
__device__ inline void store_number(UInt32 to, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}
__device__ inline float load_number(UInt32 from) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
  return x;
}

}  // namespace tessera::gpu
