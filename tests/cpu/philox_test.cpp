// SPDX-License-Identifier: Apache-2.0
// Dropout's random bits: Philox against its authors' known answers, the element map restated from the contract in other
// words, the entry point that returns the mask, and its use by every kernel.
// Links tessera_cases. Implements docs/algorithm.md, "Dropout".
#include "math/philox.hpp"

#include <array>
#include <cmath>

#include "tests/support/support.hpp"

namespace tessera::test {
namespace {

using Words = std::array<std::uint32_t, 4>;

Words words(const Philox4& x) { return {x.word[0], x.word[1], x.word[2], x.word[3]}; }

// kat_vectors of the Random123 distribution, "philox4x32 10".
TEST(Philox, KnownAnswers) {
  const std::uint32_t ones = 0xffffffff;
  EXPECT_EQ(words(philox({{0, 0, 0, 0}}, {{0, 0}})), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(words(philox({{ones, ones, ones, ones}}, {{ones, ones}})),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(words(philox({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, {{0xa4093822, 0x299f31d0}})),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

// The contract's paragraph, with the 128 bits as one number instead of an array of words.
__extension__ typedef unsigned __int128 Bits;

bool kept_by_contract(std::uint64_t seed, std::uint64_t offset, double p, std::int64_t b, std::int64_t h,
                      std::int64_t i, std::int64_t j) {
  const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x % (std::uint64_t{1} << 32)); };
  const Words stream = words(philox({{low(offset), low(offset >> 32), 0, 0}}, {{low(seed), low(seed >> 32)}}));
  const std::int64_t pair = j % 16 % 8 / 2;  // (j>>1) & 3
  const Words block =
      words(philox({{low(static_cast<std::uint64_t>(j / 16 * 4 + pair)), low(static_cast<std::uint64_t>(i / 2)),
                     low(static_cast<std::uint64_t>(h)), low(static_cast<std::uint64_t>(b))}},
                   {{stream[0], stream[1]}}));
  Bits bits = 0;
  for (std::size_t n = 4; n-- > 0;) bits = (bits << 32) | block[n];
  const auto number = 4 * (i % 2) + 2 * (j / 8 % 2) + j % 2;
  return static_cast<double>(static_cast<std::uint16_t>(bits >> (16 * number))) >= std::round(65536 * p);
}

TEST(DropoutMask, FollowsTheContract) {
  for (const Options& o : {Options{.dropout = 0.5}, Options{.dropout = 0.1, .seed = 77, .seed_offset = 1},
                           Options{.dropout = 0.9, .seed = ~0ull, .seed_offset = ~0ull - 5, .row0 = 7, .col0 = 13},
                           Options{.dropout = 0.25, .seed = 1ull << 40, .head0 = 6, .batch0 = 1ll << 33}}) {
    const Buffer mask(Type::u8, {2, 3, 21, 70}, {.order = {3, 1, 0, 2}, .gap = 2});
    dropout_mask(mask.tensor(), o);
    for (std::int64_t e = 0; e < mask.elements(); ++e) {
      const std::int64_t j = e % 70, i = e / 70 % 21, h = e / 70 / 21 % 3, b = e / 70 / 21 / 3;
      ASSERT_EQ(mask.get(e) != 0,
                kept_by_contract(o.seed, o.seed_offset, o.dropout, b + o.batch0, h + o.head0, i + o.row0, j + o.col0))
          << mask.index(e);
      ASSERT_TRUE(mask.get(e) == 0 || mask.get(e) == 1);
    }
    EXPECT_TRUE(mask.margins_intact());
  }
}

TEST(DropoutMask, ThresholdAndScale) {
  EXPECT_EQ(dropout_threshold(0), 0u);
  EXPECT_EQ(dropout_threshold(0.5), 32768u);
  EXPECT_EQ(dropout_threshold(0.1), 6554u);        // 6553.6 rounds up
  EXPECT_EQ(dropout_threshold(1.49 / 65536), 1u);  // to nearest
  EXPECT_EQ(dropout_scale(0), 1.0);
  EXPECT_EQ(dropout_scale(32768), 2.0);
  EXPECT_EQ(dropout_scale(6554), 65536.0 / 58982.0);  // the true keep rate, not 1 / (1 - 0.1)
  const Buffer mask(Type::u8, {1, 1, 16, 16});
  dropout_mask(mask.tensor(), {.dropout = 0});
  for (double x : mask.values()) EXPECT_EQ(x, 1);
}

// A shard's mask is a piece of the whole's, wherever the piece begins.
TEST(DropoutMask, PositionsSelectAPieceOfTheWhole) {
  const Buffer whole(Type::u8, {3, 4, 40, 90});
  dropout_mask(whole.tensor(), {.dropout = 0.5, .seed = 3});
  for (std::int64_t row0 : {0, 1, 6, 19})
    for (std::int64_t col0 : {0, 1, 7, 8, 15, 33}) {
      const Buffer piece(Type::u8, {2, 2, 20, 50});
      dropout_mask(piece.tensor(), {.dropout = 0.5, .seed = 3, .row0 = row0, .col0 = col0, .head0 = 2, .batch0 = 1});
      for (std::int64_t e = 0; e < piece.elements(); ++e) {
        const std::int64_t j = e % 50, i = e / 50 % 20, h = e / 1000 % 2, b = e / 2000;
        ASSERT_EQ(piece.get(e), whole.get((((b + 1) * 4 + h + 2) * 40 + i + row0) * 90 + j + col0)) << piece.index(e);
      }
    }
}

// Share of agreement between the mask and itself moved by (b, h, i, j): 1/2 for independent fair bits.
double agreement(const std::vector<double>& mask, std::size_t distance) {
  double same = 0;
  for (std::size_t e = distance; e < mask.size(); ++e) same += mask[e] == mask[e - distance];
  return same / static_cast<double>(mask.size() - distance);
}

TEST(DropoutMask, NeighboursAreIndependent) {
  const Buffer mask(Type::u8, {2, 2, 256, 256});
  dropout_mask(mask.tensor(), {.dropout = 0.5, .seed = 2024});
  const auto values = mask.values();
  const double bound = 5 * 0.5 / std::sqrt(static_cast<double>(values.size()));
  for (std::size_t distance : {1, 2, 3, 4, 8, 16, 64, 256, 257, 512, 520, 65536, 131072})
    EXPECT_NEAR(agreement(values, distance), 0.5, bound) << distance;
}

TEST(DropoutMask, SeedAndOffsetGiveOtherMasks) {
  const auto values = [](std::uint64_t seed, std::uint64_t offset) {
    const Buffer mask(Type::u8, {1, 1, 64, 64});
    dropout_mask(mask.tensor(), {.dropout = 0.5, .seed = seed, .seed_offset = offset});
    return mask.values();
  };
  EXPECT_EQ(values(1, 2), values(1, 2));
  for (const auto& other : {values(2, 1), values(1, 3), values(1 + (1ull << 32), 2), values(1, 2 + (1ull << 32))})
    EXPECT_NE(values(1, 2), other);
}

// The rng tensor means what the host's integers mean, on every kernel, forward and backward.
TEST(DropoutSeed, TensorAndHostGiveTheSameBits) {
  for (const std::string& kernel : available_kernels()) {
    Case spec{.name = "rng", .Nq = 70, .Nk = 200, .D = 16, .options = {.dropout = 0.3, .seed = 12, .seed_offset = 9}};
    CaseData host = build(spec);
    spec.rng = true;
    CaseData tensor = build(spec);
    spec.rng = false, spec.options.seed = 13;
    CaseData other = build(spec);
    for (CaseData* data : {&host, &tensor, &other}) run(*data, {.kernel = kernel.c_str()});
    expect_same_bits(host.o, tensor.o, kernel + " o");
    expect_same_bits(host.dq, tensor.dq, kernel + " dq");
    expect_same_bits(host.dv, tensor.dv, kernel + " dv");
    EXPECT_NE(host.o.bits(), other.o.bits()) << kernel;
  }
}

}  // namespace
}  // namespace tessera::test
