// SPDX-License-Identifier: Apache-2.0
// Stands in for src/gpu/kernel/math.cuh on the host.
#pragma once

#include <cmath>

#include "gpu/config.hpp"
#include "math/types.hpp"

namespace tessera::gpu {

inline float exp2_of(float x) { return std::exp2(x); }
inline UInt16 nearest_f16(float x) { return narrow<F16>(x).bits; }

template <Element element>
UInt32 packed(float first, float second) {
  if constexpr (element == Element::bf16) return narrow<BF16>(first).bits | UInt32(narrow<BF16>(second).bits) << 16;
  if constexpr (element == Element::f16) return narrow<F16>(first).bits | UInt32(narrow<F16>(second).bits) << 16;
}

template <Element element>
float unpacked(UInt32 bits) {
  if constexpr (element == Element::bf16) return widen(BF16{UInt16(bits)});
  if constexpr (element == Element::f16) return widen(F16{UInt16(bits)});
  if constexpr (element == Element::f32) return __builtin_bit_cast(float, bits);
}

}  // namespace tessera::gpu
