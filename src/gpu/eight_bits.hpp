// SPDX-License-Identifier: Apache-2.0
// From the bits of an 8-bit number to those of f16, two at a time: what integers can do of it, and the numbers of the
// one multiplication or subtraction that is left. Constexpr text for the kernel and for its test, which goes through
// all 256 codes (tests/decode/decode_test.cpp).
#pragma once

#include "math/types.hpp"

namespace tessera::gpu {

// i8: 0x64 before a byte is f16's 1024 + byte. The byte is the number plus 128.
inline constexpr UInt32 i8_pair = 0x64646464u, i8_bias = 0x64806480u;  // the latter: 1152, twice

// e4m3: each byte of a pair comes in the upper half of 16 bits. Sign, exponent and mantissa in f16's places are the
// number divided by 256, subnormal ones too.
constexpr UInt32 e4m3_shifted(UInt32 pair) { return (pair & 0x80008000u) | (pair & 0x7f007f00u) >> 1; }
inline constexpr UInt32 e4m3_factor = 0x5c005c00u;  // 256, twice
// The one code that is NaN would be 480.
constexpr UInt32 with_nan(UInt32 product, UInt32 shifted) {
  if ((shifted & 0x7fffu) == 0x3f80u) product |= 0x7fffu;
  if ((shifted >> 16 & 0x7fffu) == 0x3f80u) product |= 0x7fff0000u;
  return product;
}

}  // namespace tessera::gpu
