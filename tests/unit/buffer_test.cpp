// SPDX-License-Identifier: Apache-2.0
// The judge's own tools: rounding, buffers that notice a write outside, a comparison that can fail.
// A test of cases/; links tessera_cases.
// Implements docs/numerics.md's promise that the tests can fail.
#include <cmath>
#include <limits>
#include <numbers>
#include <set>

#include "cases/compare.hpp"
#include "cases/tables.hpp"
#include "math/types.hpp"
#include "tests/support/support.hpp"

namespace tessera::test {
namespace {

TEST(Rounding, AgreesWithTheLibraryForEverySixteenBitValueAndItsNeighbours) {
  for (unsigned bits = 0; bits < 0x10000; ++bits) {
    const float half = widen(F16{static_cast<UInt16>(bits)}), brain = widen(BF16{static_cast<UInt16>(bits)});
    for (const float x : {half, std::nextafter(half, 1e30f), half * (1 + 0x1p-11f), half * (1 + 0x1p-12f)}) {
      if (std::isnan(x)) continue;
      EXPECT_EQ(round_to(Type::f16, x), widen(narrow<F16>(x))) << x;
    }
    for (const float x : {brain, std::nextafter(brain, 1e30f), brain * (1 + 0x1p-8f), brain * (1 + 0x1p-9f)}) {
      if (std::isnan(x)) continue;
      EXPECT_EQ(round_to(Type::bf16, x), widen(narrow<BF16>(x))) << x;
    }
  }
}

TEST(BufferTest, HoldsValuesInEveryTypeAndLayout) {
  for (Type type : {Type::f64, Type::f32, Type::f16, Type::bf16})
    for (const Layout& layout :
         {Layout{}, Layout{.gap = 3}, Layout{.order = {0, 2, 1, 3}, .shift = 1, .nonsense = true}}) {
      Buffer buffer(type, {2, 3, 1, 4}, layout);
      for (std::int64_t e = 0; e < 24; ++e) buffer.set(e, static_cast<double>(e) - 7.5);
      for (std::int64_t e = 0; e < 24; ++e) EXPECT_EQ(buffer.get(e), static_cast<double>(e) - 7.5);
      EXPECT_TRUE(buffer.margins_intact());
      EXPECT_EQ(buffer.index(23), "[1,2,0,3]");
    }
}

TEST(BufferTest, NoticesAWriteIntoMarginOrGap) {
  Buffer buffer(Type::f32, {2, 4}, {.gap = 2});
  auto* data = static_cast<float*>(buffer.tensor().data);
  for (int place : {-512, -1, 4, 5, 12, 520}) {
    const float before = data[place];
    data[place] = 0;
    EXPECT_FALSE(buffer.margins_intact()) << place;
    data[place] = before;
  }
  EXPECT_TRUE(buffer.margins_intact());
}

Expected exactly(const std::vector<double>& x) {
  return {.exact = x, .model = x, .bound = std::vector<double>(x.size(), 1.0), .initial = {}};
}

TEST(Compare, AcceptsTheAllowanceAndNoMore) {
  Expected expected = exactly({1, 2, 3, 4});
  Buffer x = of(Type::f64, {4}, {1, 2, 3, 4 + 1.9 * absolute_factor});  // |A| = 2
  EXPECT_TRUE(compare("o", x, expected).ok);
  x.set(3, 4 + 2.1 * absolute_factor);
  EXPECT_FALSE(compare("o", x, expected).ok);
  expected.model[0] += 1e-3;
  x.set(3, 4 + 1.4e-3);
  EXPECT_TRUE(compare("o", x, expected).ok);
  x.set(3, 4 + 1.6e-3);
  EXPECT_FALSE(compare("o", x, expected).ok);
}

TEST(Compare, TreatsInfinityNanZeroAndPaddingApart) {
  const double infinity = std::numeric_limits<double>::infinity();
  Expected expected = exactly({-infinity, 0, 1, 1});
  expected.bound = {1, 0, 1, std::nan("")};
  Buffer x(Type::f32, {4});
  x.set(0, -infinity), x.set(1, 0), x.set(2, 1);
  EXPECT_TRUE(compare("o", x, expected).ok);
  x.set(0, -3e38);
  EXPECT_FALSE(compare("o", x, expected).ok) << "a finite stand-in for -inf";
  x.set(0, -infinity), x.set(1, 1e-30);
  EXPECT_FALSE(compare("o", x, expected).ok) << "nothing contributes, so it must be zero";
  x.set(1, 0), x.set(2, std::nan(""));
  EXPECT_FALSE(compare("o", x, expected).ok) << "NaN for a number";
  x.set(2, 1), x.set(3, 0);
  EXPECT_FALSE(compare("o", x, expected).ok) << "padding written";
}

TEST(Tables, NamesAreUniqueAndFound) {
  std::set<std::string> names;
  for (const char* table : {"all", "performance"})
    for (const Case& c : suite(table)) EXPECT_TRUE(names.insert(c.name).second) << c.name;
  EXPECT_EQ(find_case("identity_4x4").D, 4);
  EXPECT_THROW(find_case("no such case"), std::invalid_argument);
  EXPECT_THROW(suite("no such suite"), std::invalid_argument);
}

// LSE of 2^25 scores of 0 is 17.3: numbers of f32 are further apart there than the rest of the rule allows.
TEST(Compare, LseMayBeRounded) {
  const double exact = 25 * std::numbers::ln2, step = spacing(Type::f32, exact);
  const auto judged = [&](double value) {
    Buffer lse(Type::f32, {1, 1, 1});
    lse.set(0, value);
    return compare_lse(lse, {.exact = {exact}, .model = {exact}, .bound = {1}, .initial = {}});
  };
  const double nearest = static_cast<float>(exact);
  EXPECT_TRUE(judged(nearest).ok);
  EXPECT_GT(std::abs(nearest - exact), absolute_factor) << "not a number that the rule once refused";
  EXPECT_FALSE(judged(nearest + step).ok && judged(nearest - step).ok);
  EXPECT_FALSE(judged(nearest + 2 * step).ok);
  EXPECT_FALSE(judged(nearest - 2 * step).ok);
}

}  // namespace
}  // namespace tessera::test
