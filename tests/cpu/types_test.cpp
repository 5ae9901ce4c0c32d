// SPDX-License-Identifier: Apache-2.0
// Conversions between f16, bf16, e4m3, i8, f32 and f64: every pattern and every rounding boundary, in the scalar text
// and, through forward passes that copy or halve V, in every kernel's rows. Links tessera_cases. Implements the
// contract's "each output rounded to its type" (docs/numerics.md).
#include "math/types.hpp"

#include <cmath>
#include <limits>

#include "core/failure.hpp"
#include "core/tensor.hpp"
#include "tests/support/support.hpp"

namespace tessera::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// The value of a pattern from its fields, with no help from the library.
double value_of(std::uint16_t bits, int mantissa_bits) {
  const int exponent_bits = 15 - mantissa_bits, bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits & 0x7fff) >> mantissa_bits, mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) return mantissa ? std::nan("") : sign * infinity;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

template <class T>
struct Format;
template <>
struct Format<F16> {
  static constexpr int mantissa_bits = 10;
  static constexpr Type type = Type::f16;
};
template <>
struct Format<BF16> {
  static constexpr int mantissa_bits = 7;
  static constexpr Type type = Type::bf16;
};

template <class T>
class Half : public testing::Test {
 public:
  static constexpr int mantissa_bits = Format<T>::mantissa_bits;
  static constexpr std::uint16_t infinite = static_cast<std::uint16_t>(0x7fff >> mantissa_bits << mantissa_bits);

  static double value(int bits) { return value_of(static_cast<std::uint16_t>(bits), mantissa_bits); }
  static std::uint16_t stored(double x) {
    T out;
    store_element(&out, Format<T>::type, 0, x);
    return out.bits;
  }
};
using Halves = testing::Types<F16, BF16>;
TYPED_TEST_SUITE(Half, Halves);

TYPED_TEST(Half, WidensEveryPatternExactly) {
  for (int bits = 0; bits < 65536; ++bits) {
    const TypeParam x{static_cast<UInt16>(bits)};
    const float wide = widen(x);
    const double expected = this->value(bits), loaded = load_element(&x, Format<TypeParam>::type, 0);
    ASSERT_EQ(std::isnan(wide), std::isnan(expected)) << std::hex << bits;
    ASSERT_EQ(std::isnan(loaded), std::isnan(expected)) << std::hex << bits;
    ASSERT_EQ(std::signbit(wide), bits >= 0x8000) << std::hex << bits;
    if (std::isnan(expected)) continue;
    ASSERT_EQ(static_cast<double>(wide), expected) << std::hex << bits;
    ASSERT_EQ(loaded, expected) << std::hex << bits;
  }
}

TYPED_TEST(Half, NarrowsEveryPatternBackToItself) {
  for (int bits = 0; bits < 65536; ++bits) {
    const TypeParam x{static_cast<UInt16>(bits)}, back = narrow<TypeParam>(widen(x));
    if (std::isnan(this->value(bits))) {
      ASSERT_TRUE(std::isnan(this->value(back.bits))) << std::hex << bits;
      ASSERT_EQ(back.bits & 0x8000, bits & 0x8000) << std::hex << bits;
    } else {
      ASSERT_EQ(back.bits, bits);
      ASSERT_EQ(this->stored(this->value(bits)), bits);
    }
  }
}

// Between two neighbours lies one boundary: on it the even one wins, beside it the nearer one. The last neighbour is
// infinity, whose boundary is where the next finite number would have its own.
TYPED_TEST(Half, RoundsAtEveryBoundary) {
  for (int low = 0; low < this->infinite; ++low)
    for (int sign : {0, 0x8000}) {
      const double a = this->value(low);
      const double step = low + 1 == this->infinite ? a - this->value(low - 1) : this->value(low + 1) - a;
      const double middle = (a + step / 2) * (sign ? -1 : 1), away = sign ? -infinity : infinity;
      const int even = (low % 2 == 0 ? low : low + 1) | sign, above = (low + 1) | sign, below = low | sign;
      const auto single = static_cast<float>(middle);
      ASSERT_EQ(static_cast<double>(single), middle);
      ASSERT_EQ(narrow<TypeParam>(single).bits, even) << std::hex << low;
      ASSERT_EQ(narrow<TypeParam>(std::nextafter(single, static_cast<float>(away))).bits, above) << std::hex << low;
      ASSERT_EQ(narrow<TypeParam>(std::nextafter(single, 0.0f)).bits, below) << std::hex << low;
      // From f64 there is one rounding: a hair beside the boundary, which f32 cannot see, still decides.
      ASSERT_EQ(this->stored(middle), even) << std::hex << low;
      ASSERT_EQ(this->stored(std::nextafter(middle, away)), above) << std::hex << low;
      ASSERT_EQ(this->stored(std::nextafter(middle, 0.0)), below) << std::hex << low;
    }
}

TYPED_TEST(Half, KeepsWhatIsBeyondItsRange) {
  EXPECT_EQ(narrow<TypeParam>(std::numeric_limits<float>::infinity()).bits, this->infinite);
  EXPECT_EQ(narrow<TypeParam>(-std::numeric_limits<float>::max()).bits, 0x8000 | this->infinite);
  EXPECT_EQ(narrow<TypeParam>(-0.0f).bits, 0x8000);
  EXPECT_EQ(this->stored(1e300), this->infinite);
  EXPECT_EQ(this->stored(-1e-300), 0x8000);
  EXPECT_TRUE(std::isnan(this->value(this->stored(std::nan("")))));
  // A NaN whose payload lies in the bits that are cut off must not become infinity.
  EXPECT_TRUE(std::isnan(this->value(narrow<TypeParam>(__builtin_bit_cast(float, 0x7f800001u)).bits)));
}

TEST(Elements, OfOtherTypes) {
  const std::int32_t integer = -7;
  const std::uint8_t byte = 200;
  float single = 0;
  EXPECT_EQ(load_element(&integer, Type::i32, 0), -7);
  EXPECT_EQ(load_element(&byte, Type::u8, 0), 200);
  store_element(&single, Type::f32, 0, 1 + 0x1p-24 + 0x1p-50);
  EXPECT_EQ(single, 1 + 0x1p-23f);
  EXPECT_THROW(load_element(&byte, Type::e5m2, 0), Failure);
  EXPECT_THROW(store_element(&single, Type::i64, 0, 1), Failure);
}

// OCP's e4m3 without infinities, from its fields.
double e4m3_of(int bits) {
  const int exponent = (bits >> 3) & 15, mantissa = bits & 7;
  const double sign = bits & 0x80 ? -1 : 1;
  if ((bits & 0x7f) == 0x7f) return std::nan("");
  return sign * (exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(mantissa + 8, exponent - 10));
}

std::uint8_t stored_byte(double x, Type type) {
  std::uint8_t out;
  store_element(&out, type, 0, x);
  return out;
}

TEST(Bytes, EveryPatternOfE4M3) {
  EXPECT_EQ(e4m3_of(0x7e), 448);
  for (int bits = 0; bits < 256; ++bits) {
    const E4M3 x{static_cast<unsigned char>(bits)};
    const double expected = e4m3_of(bits), loaded = load_element(&x, Type::e4m3, 0);
    ASSERT_EQ(std::signbit(widen(x)), bits >= 0x80) << bits;
    ASSERT_EQ(std::isnan(widen(x)), std::isnan(expected)) << bits;
    ASSERT_EQ(std::isnan(loaded), std::isnan(expected)) << bits;
    ASSERT_EQ(narrow<E4M3>(widen(x)).bits, bits);
    if (std::isnan(expected)) continue;
    ASSERT_EQ(static_cast<double>(widen(x)), expected) << bits;
    ASSERT_EQ(loaded, expected) << bits;
    ASSERT_EQ(stored_byte(expected, Type::e4m3), bits);
  }
}

TEST(Bytes, E4M3RoundsAtEveryBoundaryAndSaturates) {
  for (int low = 0; low < 0x7e; ++low)
    for (int sign : {0, 0x80}) {
      const double middle = (e4m3_of(low) + e4m3_of(low + 1)) / 2 * (sign ? -1 : 1), away = sign ? -infinity : infinity;
      const int even = (low % 2 == 0 ? low : low + 1) | sign;
      ASSERT_EQ(narrow<E4M3>(static_cast<float>(middle)).bits, even) << low;
      ASSERT_EQ(stored_byte(middle, Type::e4m3), even) << low;
      ASSERT_EQ(stored_byte(std::nextafter(middle, away), Type::e4m3), (low + 1) | sign) << low;
      ASSERT_EQ(stored_byte(std::nextafter(middle, 0.0), Type::e4m3), low | sign) << low;
    }
  for (double x : {448.1, 464.0, 1e30, infinity}) {
    EXPECT_EQ(stored_byte(x, Type::e4m3), 0x7e) << x;
    EXPECT_EQ(stored_byte(-x, Type::e4m3), 0xfe) << x;
  }
}

TEST(Bytes, IntegersRoundAndSaturate) {
  for (int n = -128; n < 128; ++n) {
    const auto x = static_cast<std::int8_t>(n);
    ASSERT_EQ(load_element(&x, Type::i8, 0), n);
    ASSERT_EQ(widen(x), static_cast<float>(n));
    ASSERT_EQ(static_cast<std::int8_t>(stored_byte(n, Type::i8)), n);
    if (n == 127) continue;
    const int even = n % 2 == 0 ? n : n + 1;
    ASSERT_EQ(static_cast<std::int8_t>(stored_byte(n + 0.5, Type::i8)), even);
    ASSERT_EQ(static_cast<std::int8_t>(stored_byte(std::nextafter(n + 0.5, 1e9), Type::i8)), n + 1);
    ASSERT_EQ(static_cast<std::int8_t>(stored_byte(std::nextafter(n + 0.5, -1e9), Type::i8)), n);
  }
  EXPECT_EQ(static_cast<std::int8_t>(stored_byte(1e30, Type::i8)), 127);
  EXPECT_EQ(static_cast<std::int8_t>(stored_byte(-infinity, Type::i8)), -128);
  EXPECT_EQ(stored_byte(std::nan(""), Type::i8), 0);
}

// --- the kernels' rows ----------------------------------------------------------------------------------------------

constexpr std::int64_t heads = 128, width = 512;  // 65536 patterns

// With Q = 0 every key has the same weight: one key copies V, two keys give the middle of theirs.
Buffer mean_of(const std::vector<std::vector<std::uint16_t>>& keys, Type type, Type o_type, const std::string& kernel) {
  const auto n = static_cast<std::int64_t>(keys.size());
  const Buffer q = filled(type, {1, 1, heads, 1}, 0), k = filled(type, {1, n, heads, 1}, 0);
  const Buffer v(type, {1, n, heads, width});
  for (std::size_t j = 0; j < keys.size(); ++j)
    std::copy(keys[j].begin(), keys[j].end(), static_cast<std::uint16_t*>(v.tensor().data) + j * heads * width);
  Buffer o(o_type, {1, 1, heads, width});
  Inputs in;
  in.q = q.tensor(), in.k = k.tensor(), in.v = v.tensor();
  forward(in, {.o = o.tensor(), .lse = {}}, {}, {.kernel = kernel.c_str()});
  return o;
}

TYPED_TEST(Half, EveryPatternPassesThroughEveryKernel) {
  std::vector<std::uint16_t> all(65536);
  for (std::size_t n = 0; n < all.size(); ++n) all[n] = static_cast<std::uint16_t>(n);
  for (const std::string& kernel : available_kernels())
    for (Type o_type : {Format<TypeParam>::type, Type::f32}) {
      const Buffer o = mean_of({all}, Format<TypeParam>::type, o_type, kernel);
      for (int bits = 0; bits < 65536; ++bits) {
        const double got = o.get(bits), expected = this->value(bits);
        ASSERT_TRUE(got == expected || (std::isnan(got) && std::isnan(expected)))
            << kernel << " " << std::hex << bits << ": " << got << " for " << expected;
      }
    }
}

// One query goes the way of decoding, nine that of tiles; 256 columns are whole vectors, 251 are not.
TEST(Bytes, EveryPatternPassesThroughEveryKernel) {
  for (const std::string& kernel : available_kernels())
    for (Type type : {Type::e4m3, Type::i8})
      for (std::int64_t queries : {1, 9})
        for (std::int64_t columns : {256, 251}) {
          const Buffer q = filled(Type::f32, {1, queries, 1, 1}, 0), k = filled(Type::f32, {1, 1, 1, 1}, 0);
          Buffer v(type, {1, 1, 1, columns}), o(Type::f32, {1, queries, 1, columns});
          auto* patterns = static_cast<std::uint8_t*>(v.tensor().data);
          for (std::int64_t n = 0; n < columns; ++n) patterns[n] = static_cast<std::uint8_t>(n + 256 - columns);
          forward({.q = q.tensor(), .k = k.tensor(), .v = v.tensor()}, {.o = o.tensor()}, {},
                  {.kernel = kernel.c_str()});
          for (std::int64_t e = 0; e < o.elements(); ++e) {
            const int bits = static_cast<int>(e % columns + 256 - columns);
            const double expected = type == Type::e4m3 ? e4m3_of(bits) : static_cast<std::int8_t>(bits), got = o.get(e);
            ASSERT_TRUE(got == expected || (std::isnan(got) && std::isnan(expected)))
                << kernel << " " << cases::name_of(type) << " " << bits << ": " << got << " for " << expected;
          }
          ++case_count.judged;
        }
}

TYPED_TEST(Half, EveryKernelRoundsTiesToEven) {
  std::vector<std::uint16_t> low(65536), high(65536);
  for (std::size_t n = 0; n < low.size(); ++n) {
    // Neighbours whose sum stays finite in f32.
    const std::size_t first = n % 0x7e00;
    low[n] = static_cast<std::uint16_t>(this->value(static_cast<int>(first) + 1) < 1e38 ? first : 0);
    high[n] = static_cast<std::uint16_t>(low[n] + 1);
    if (low[n] + 1 >= this->infinite) low[n] = 0, high[n] = 1;
  }
  for (const std::string& kernel : available_kernels()) {
    const Buffer o = mean_of({low, high}, Format<TypeParam>::type, Format<TypeParam>::type, kernel);
    const auto bits = o.bits();
    for (std::size_t n = 0; n < bits.size(); ++n)
      ASSERT_EQ(bits[n], low[n] % 2 == 0 ? low[n] : high[n]) << kernel << " " << std::hex << low[n];
  }
}

}  // namespace
}  // namespace tessera::test
