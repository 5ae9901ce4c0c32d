// SPDX-License-Identifier: Apache-2.0
// Single instructions of the PTX ISA that kernels of all families use. Device code.
#pragma once

#include "gpu/config.hpp"

namespace tessera::gpu {

// 2^x by the special function unit; relative error at most 2^-22.5, below 2^-126 the result is 0.
__device__ inline float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// To the nearest f16, ties to even: its bits.
__device__ inline UInt16 nearest_f16(float x) {
  UInt16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

// Two 16-bit numbers in one register, the first in its low half. Before sm_80, which has no bf16, in two instructions.
template <Element element>
__device__ inline UInt32 packed(float first, float second) {
  UInt32 y;
#if __CUDA_ARCH__ >= 800
  if constexpr (element == Element::bf16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
  if constexpr (element == Element::f16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
#else
  static_assert(element == Element::f16);
  asm("{\n.reg .f16 low, high;\ncvt.rn.f16.f32 low, %1;\ncvt.rn.f16.f32 high, %2;\nmov.b32 %0, {low, high};\n}"
      : "=r"(y)
      : "f"(first), "f"(second));
#endif
  return y;
}

// The number in the low half, or in all of it.
template <Element element>
__device__ inline float unpacked(UInt32 bits) {
  float y;
  if constexpr (element == Element::bf16) y = __uint_as_float(bits << 16);
  if constexpr (element == Element::f16) asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(UInt16(bits)));
  if constexpr (element == Element::f32) y = __uint_as_float(bits);
  return y;
}

}  // namespace tessera::gpu
