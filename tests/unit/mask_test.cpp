// SPDX-License-Identifier: Apache-2.0
// The mask's ranges and tile classes against visible(), and visible() against the contract's sentence, for every small
// mask there is and for positions at the ends of int64. Kernels skip tiles by these functions; the reference does not.
// Uses src/math/mask.hpp alone. Implements docs/algorithm.md, "Mask".
#include "math/mask.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace tessera {
namespace {

__extension__ typedef __int128 Wide;  // sums of any two int64

constexpr Int64 smallest = std::numeric_limits<std::int64_t>::min(), largest = std::numeric_limits<std::int64_t>::max();

struct Setting {
  Int64 rows, keys;
  bool causal;
  Int64 left, right, off, row0 = 0, col0 = 0;

  BandMask mask() const { return band_mask(rows, keys, causal, left, right, off, row0, col0); }
  std::string text() const {
    std::string out = "rows keys causal left right off row0 col0:";
    for (Int64 x : {rows, keys, Int64(causal), left, right, off, row0, col0}) (out += " ") += std::to_string(x);
    return out;
  }

  // The contract, word by word.
  bool defined_visible(Int64 i, Int64 j) const {
    const Wide row = Wide(i) + row0 + off, col = Wide(j) + col0;
    if (j >= keys) return false;
    if (causal && col > row) return false;
    if (left >= 0 && col < row - left) return false;
    if (right >= 0 && col > row + right) return false;
    return true;
  }
};

bool same(Range a, Range b) { return (a.empty() && b.empty()) || (a.begin == b.begin && a.end == b.end); }

// What visible() says about a tile: the hull of the keys and of the queries that take part, and the class.
struct Counted {
  Range keys{largest, 0}, queries{largest, 0};
  TileClass kind = TileClass::empty;
};

Counted count(const BandMask& mask, Range queries, Range keys) {
  Counted c;
  Int64 seen = 0;
  for (Int64 i = queries.begin; i < queries.end; ++i)
    for (Int64 j = keys.begin; j < keys.end; ++j) {
      if (!mask.visible(i, j)) continue;
      ++seen;
      c.keys = {lesser(c.keys.begin, j), greater(c.keys.end, j + 1)};
      c.queries = {lesser(c.queries.begin, i), greater(c.queries.end, i + 1)};
    }
  if (seen > 0) c.kind = seen == queries.size() * keys.size() ? TileClass::full : TileClass::partial;
  return c;
}

void compare(const Setting& s) {
  const BandMask mask = s.mask();
  for (Int64 i = 0; i < s.rows; ++i)
    for (Int64 j = 0; j < s.keys + 2; ++j)
      ASSERT_EQ(mask.visible(i, j), s.defined_visible(i, j)) << i << "," << j << "; " << s.text();
  const Range all_rows{0, s.rows}, all_keys{0, s.keys};
  for (Int64 begin = 0; begin < s.rows; ++begin)
    for (Int64 end = begin; end <= s.rows; ++end) {
      const Range queries{begin, end};
      ASSERT_TRUE(same(visible_keys(mask, queries), count(mask, queries, all_keys).keys)) << s.text();
      for (Int64 first = 0; first < s.keys; ++first)
        for (Int64 last = first; last <= s.keys + 1; ++last)  // a tile may reach beyond the keys
          ASSERT_EQ(tile_class(mask, queries, {first, last}), count(mask, queries, {first, last}).kind)
              << begin << ".." << end << ", " << first << ".." << last << "; " << s.text();
    }
  for (Int64 first = 0; first < s.keys; ++first)
    for (Int64 last = first; last <= s.keys + 1; ++last)
      ASSERT_TRUE(same(visible_queries(mask, {first, last}), count(mask, all_rows, {first, last}).queries)) << s.text();
}

const std::vector<Int64> widths{-1, 0, 1, 2, 9};

TEST(Mask, EverySmallMask) {
  for (Int64 rows = 0; rows <= 4; ++rows)
    for (Int64 keys = 0; keys <= 5; ++keys)
      for (bool causal : {false, true})
        for (Int64 left : widths)
          for (Int64 right : widths) {
            compare({rows, keys, causal, left, right, keys - rows});                                // bottom right
            for (Int64 off = -7; off <= 7; ++off) compare({rows, keys, causal, left, right, off});  // 0: top left
            if (HasFatalFailure()) return;
          }
}

TEST(Mask, PositionsShiftTheDiagonal) {
  for (Int64 row0 = -3; row0 <= 3; ++row0)
    for (Int64 col0 = -3; col0 <= 3; ++col0)
      for (Int64 left : widths)
        for (bool causal : {false, true}) {
          compare({4, 5, causal, left, 1, 1, row0, col0});
          if (HasFatalFailure()) return;
        }
}

// One number at a time goes to the end of its range: the mask is then all or nothing, and nothing overflows.
TEST(Mask, EndsOfInt64) {
  for (Int64 far : {smallest, smallest + 1, -(Int64(1) << 60), Int64(1) << 60, largest - 1, largest})
    for (bool causal : {false, true})
      for (Int64 width : widths) {
        compare({4, 5, causal, width, width, far});
        compare({4, 5, causal, width, width, 0, far});
        compare({4, 5, causal, width, width, 0, 0, far});
        if (far < 0) continue;
        compare({4, 5, causal, far, width, 1});
        compare({4, 5, causal, width, far, 1});
        if (HasFatalFailure()) return;
      }
}

TEST(Mask, LongSequencesAtTheirTileEdges) {
  const Int64 n = Int64(1) << 40;
  const BandMask mask = band_mask(n, n, true, 1000, -1, 0, 0, 0);
  EXPECT_TRUE(same(visible_keys(mask, {n - 64, n}), {n - 1064, n}));
  EXPECT_TRUE(same(visible_queries(mask, {0, 192}), {0, 1192}));
  EXPECT_EQ(tile_class(mask, {n - 64, n}, {n - 192, n}), TileClass::partial);
  EXPECT_EQ(tile_class(mask, {n - 64, n}, {n - 256, n - 64}), TileClass::full);
  EXPECT_EQ(tile_class(mask, {n - 64, n}, {0, 192}), TileClass::empty);
}

}  // namespace
}  // namespace tessera
