// SPDX-License-Identifier: Apache-2.0
// Numbers of 8-bit caches as f16, which holds every one of them exactly: two at a time, from the bytes that ldmatrix
// brings. Device code; gpu/eight_bits.hpp has what of it can be shown without a GPU.
#pragma once

#include "gpu/config.hpp"
#include "gpu/eight_bits.hpp"

namespace tessera::gpu {

// "prmt": bytes of x and y, of which each digit of the selector names one.
__device__ inline UInt32 bytes_of(UInt32 x, UInt32 y, UInt32 selector) {
  UInt32 z;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(selector));
  return z;
}

// Bytes 0 and 1 of x, or, high, 2 and 3: two numbers of f16.
template <Element type, bool high>
__device__ inline UInt32 widened(UInt32 x) {
  UInt32 y;
  if constexpr (type == Element::i8) {
    const UInt32 biased = bytes_of(x ^ 0x80808080u, i8_pair, high ? 0x4342 : 0x4140);
    asm("sub.f16x2 %0, %1, %2;" : "=r"(y) : "r"(biased), "r"(i8_bias));
  } else {
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(UInt16(high ? x >> 16 : x)));
#else
    const UInt32 shifted = e4m3_shifted(bytes_of(x, 0, high ? 0x3424 : 0x1404));
    asm("mul.f16x2 %0, %1, %2;" : "=r"(y) : "r"(shifted), "r"(e4m3_factor));
    y = with_nan(y, shifted);
#endif
  }
  return y;
}

}  // namespace tessera::gpu
