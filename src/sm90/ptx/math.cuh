// Pairs of 16-bit numbers in one register: one function, one instruction of the PTX ISA. Device code.
#pragma once

#include "gpu/kernel/math.cuh"
#include "sm90/config.hpp"

namespace tessera::sm90 {

using gpu::exp2_of;

// Two numbers in one register, the first in its low half.
template <Element element>
__device__ inline UInt32 packed(float first, float second) {
  UInt32 y;
  if constexpr (element == Element::bf16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
  if constexpr (element == Element::f16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
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

}  // namespace tessera::sm90
