// SPDX-License-Identifier: Apache-2.0
// Stands in for src/gpu/kernel/eight_bits.cuh on the host.
#pragma once

#include "gpu/config.hpp"
#include "math/types.hpp"

namespace tessera::gpu {

inline UInt32 bytes_of(UInt32 x, UInt32 y, UInt32 selector) {
  UInt32 z = 0;
  for (int n = 0; n < 4; ++n) {
    const UInt32 from = selector >> 4 * n & 7;
    z |= ((from < 4 ? x >> 8 * from : y >> 8 * (from - 4)) & 0xffu) << 8 * n;
  }
  return z;
}

template <Element type, bool high>
UInt32 widened(UInt32 x) {
  const auto number = [&](int n) -> UInt32 {
    const auto byte = static_cast<unsigned char>(x >> 8 * (n + 2 * high));
    if constexpr (type == Element::i8) return narrow<F16>(widen(static_cast<Int8>(byte))).bits;
    return narrow<F16>(widen(E4M3{byte})).bits;
  };
  return number(0) | number(1) << 16;
}

}  // namespace tessera::gpu
