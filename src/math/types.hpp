// SPDX-License-Identifier: Apache-2.0
// Number formats and small integer helpers: exact conversions between f16, bf16, e4m3 and f32, as constexpr text.
// Included by host code, SIMD code and device code, so it includes nothing but itself; see docs/architecture.md.
// Rounding is to nearest, ties to even, as the contract's "each output rounded to its type" means it.
#pragma once

// Inlined always: a header that is compiled for several instruction sets must leave no out-of-line copy, of which the
// linker would keep one for everyone.
#define TESSERA_ALWAYS_INLINE __attribute__((always_inline)) constexpr

namespace tessera {

using Int32 = int;
using Int64 = long long;
using UInt16 = unsigned short;
using UInt32 = unsigned int;
using UInt64 = unsigned long long;
static_assert(sizeof(Int32) == 4 && sizeof(Int64) == 8 && sizeof(UInt16) == 2);

// 16-bit floats as bits: g++ 12 has no __bf16, and storage is all that is needed.
struct F16 {
  UInt16 bits;
};
struct BF16 {
  UInt16 bits;
};
// 8 bits of a cache: OCP's e4m3 without infinities, and integers.
struct E4M3 {
  unsigned char bits;
};
using Int8 = signed char;

constexpr Int64 ceil_div(Int64 a, Int64 b) { return (a + b - 1) / b; }
constexpr Int64 round_up(Int64 a, Int64 b) { return ceil_div(a, b) * b; }
constexpr Int64 lesser(Int64 a, Int64 b) { return a < b ? a : b; }
constexpr Int64 greater(Int64 a, Int64 b) { return a > b ? a : b; }
constexpr Int64 clamp(Int64 x, Int64 low, Int64 high) { return x < low ? low : x > high ? high : x; }

constexpr float widen(float x) { return x; }
constexpr float widen(BF16 x) { return __builtin_bit_cast(float, UInt32(x.bits) << 16); }

constexpr float widen(F16 x) {
  const UInt32 sign = UInt32(x.bits & 0x8000u) << 16;
  const UInt32 magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u)  // infinity and NaN keep their payload
    return __builtin_bit_cast(float, sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  // Shifted into place the exponent is 112 too small; multiplying repairs it, subnormals included, exactly.
  const float value = __builtin_bit_cast(float, magnitude << 13) * 0x1p112f;
  return __builtin_bit_cast(float, __builtin_bit_cast(UInt32, value) | sign);
}

constexpr float widen(Int8 x) { return x; }

constexpr float widen(E4M3 x) {
  const UInt32 sign = UInt32(x.bits & 0x80u) << 24, magnitude = x.bits & 0x7fu;
  if (magnitude == 0x7fu) return __builtin_bit_cast(float, sign | 0x7fc00000u);  // the only NaN
  // As f16's, with an exponent that is 120 too small.
  const float value = __builtin_bit_cast(float, magnitude << 20) * 0x1p120f;
  return __builtin_bit_cast(float, __builtin_bit_cast(UInt32, value) | sign);
}

template <class T>
constexpr T narrow(float x);

template <>
constexpr float narrow<float>(float x) {
  return x;
}

template <>
constexpr BF16 narrow<BF16>(float x) {
  const UInt32 bits = __builtin_bit_cast(UInt32, x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {UInt16((bits >> 16) | 0x40u)};  // NaN stays NaN
  return {UInt16((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
constexpr F16 narrow<F16>(float x) {
  const UInt32 bits = __builtin_bit_cast(UInt32, x);
  const UInt16 sign = UInt16((bits >> 16) & 0x8000u);
  const UInt32 magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {UInt16(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {UInt16(sign | 0x7c00u)};  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {
    // Subnormal: adding 0.5 leaves the 10 result bits, rounded by the addition itself, at the bottom.
    const float shifted = __builtin_bit_cast(float, magnitude) + 0.5f;
    return {UInt16(sign | (__builtin_bit_cast(UInt32, shifted) - 0x3f000000u))};
  }
  const UInt32 rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return {UInt16(sign | ((rounded - 0x38000000u) >> 13))};
}

// The types of caches saturate: there is no infinity to round to.
template <>
constexpr E4M3 narrow<E4M3>(float x) {
  const UInt32 bits = __builtin_bit_cast(UInt32, x), sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<unsigned char>(sign | 0x7fu)};   // NaN
  if (magnitude >= 0x43e00000u) return {static_cast<unsigned char>(sign | 0x7eu)};  // 448 and above
  if (magnitude < 0x3c800000u) {
    // Subnormal: as f16's, by a number whose last bit counts 2^-9.
    const float shifted = __builtin_bit_cast(float, magnitude) + 0x1p14f;
    return {static_cast<unsigned char>(sign | (__builtin_bit_cast(UInt32, shifted) - 0x46800000u))};
  }
  const UInt32 rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  return {static_cast<unsigned char>(sign | ((rounded - 0x3c000000u) >> 20))};
}

// NaN becomes 0.
template <>
constexpr Int8 narrow<Int8>(float x) {
  if (x != x) return 0;
  const float inside = x < -128 ? -128 : x > 127 ? 127 : x;
  return static_cast<Int8>((inside + 0x1.8p23f) - 0x1.8p23f);
}

}  // namespace tessera
