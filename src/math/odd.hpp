// SPDX-License-Identifier: Apache-2.0
// f64 to f32, rounded to odd: rounding to nearest twice, by way of f32, would go wrong now and then. An odd last bit
// keeps enough of what was cut off for the second rounding to be the right one.
// Included by host code and device code that narrow f64 to 16 or 8 bits.
#pragma once

#include "math/types.hpp"

namespace tessera {

constexpr float to_f32_odd(double value) {
  const float f = static_cast<float>(value);
  if (static_cast<double>(f) == value || value != value || f - f != 0) return f;  // exact, NaN, infinite
  const bool away = (static_cast<double>(f) > value) == (value > 0);
  UInt32 bits = __builtin_bit_cast(UInt32, f);
  if (away) bits -= 1;  // truncate towards zero
  return __builtin_bit_cast(float, bits | 1u);
}

}  // namespace tessera
