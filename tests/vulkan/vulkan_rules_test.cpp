// SPDX-License-Identifier: Apache-2.0
// The rules on the device against the constexpr text that they were made from: mask ranges, Philox, conversions, places
// of blocks bit by bit; scores and elementary functions within their rounding.
// Uses src/vulkan directly. Implements docs/vulkan.md, "One rule in one place".
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "gpu/params.hpp"
#include "math/score.hpp"
#include "tests/vulkan/support.hpp"
#include "vulkan/device.hpp"
#include "vulkan/rules_test.spv.hpp"

namespace tessera::test {
namespace {

using Record = std::array<Int64, 16>;
using Result = std::array<Int64, 8>;
enum Rule { mask_rules, philox_rules, type_rules, place_rules, score_rules, padded_rules };

Int64 bits_of(float x) { return __builtin_bit_cast(UInt32, x); }
float float_of(Int64 bits) { return __builtin_bit_cast(float, UInt32(bits)); }

std::vector<Result> on_device(Rule rule, const std::vector<Record>& records) {
  static const vulkan::Shader shader{"rules_test", rules_test_spv};
  vulkan::DeviceContext& device = vulkan::own_device(0);
  const VulkanMemory inputs(records.size() * sizeof(Record)), results(records.size() * sizeof(Result));
  inputs.upload(records.data(), records.size() * sizeof(Record));
  const std::array<Int64, 3> task{reinterpret_cast<Int64>(inputs.data()), reinterpret_cast<Int64>(results.data()),
                                  Int64(records.size())};
  const vulkan::Dispatch dispatch{device.pipeline(shader, {rule}), std::as_bytes(std::span(task)),
                                  ceil_div(Int64(records.size()), 64)};
  device.run({&dispatch, 1}, nullptr);
  std::vector<Result> out(records.size());
  results.download(out.data(), out.size() * sizeof(Result));
  return out;
}

template <class OnHost>
void expect_same(Rule rule, const std::vector<Record>& records, OnHost on_host) {
  ASSERT_FALSE(records.empty());
  const std::vector<Result> found = on_device(rule, records);
  for (std::size_t n = 0; n < records.size(); ++n) {
    const Result wanted = on_host(records[n]);
    if (found[n] == wanted) continue;
    ADD_FAILURE() << "record " << n << ": " << testing::PrintToString(records[n]) << "\n device "
                  << testing::PrintToString(found[n]) << "\n host   " << testing::PrintToString(wanted);
    return;
  }
}

Result host_mask(const Record& r) {
  const BandMask mask = band_mask(r[0], r[1], r[2] != 0, r[3], r[4], r[5], r[6], r[7]);
  const Range queries{r[8], r[9]}, keys{r[10], r[11]};
  const Range seen = visible_keys(mask, queries), seeing = visible_queries(mask, keys);
  return {mask.low,
          mask.high,
          seen.begin,
          seen.end,
          seeing.begin,
          seeing.end,
          Int64(tile_class(mask, queries, keys)),
          mask.visible(r[8], r[10])};
}

TEST_F(Vulkan, MaskRangesOfEverySmallMask) {
  std::vector<Record> records;
  for (Int64 rows : {0, 1, 3, 5})
    for (Int64 keys : {0, 1, 2, 5})
      for (Int64 causal : {0, 1})
        for (Int64 left = -1; left < 4; ++left)
          for (Int64 right = -1; right < 4; ++right)
            for (Int64 off = -4; off <= 4; ++off)
              for (Int64 i : {0, 2})
                for (Int64 j : {0, 1})
                  for (Int64 size : {1, 3})
                    records.push_back(
                        {rows, keys, causal, left, right, off, 0, 0, i, lesser(i + size, rows), j, j + size});
  std::mt19937_64 random(7);
  const Int64 far = Int64(1) << 48;
  for (int n = 0; n < 20000; ++n) {
    const auto below = [&](Int64 most) { return Int64(random() % std::uint64_t(most)); };
    const Int64 rows = below(300), keys = below(300), i = below(300), j = below(300);
    records.push_back({rows, keys, below(2), below(400) - 100, below(400) - 100, below(far), below(far), below(far), i,
                       i + below(40), j, j + below(40)});
  }
  expect_same(mask_rules, records, host_mask);
}

TEST_F(Vulkan, PhiloxHasItsBits) {
  std::vector<Record> records;
  std::mt19937_64 random(8);
  for (int n = 0; n < 20000; ++n) {
    Record r{};
    for (int k = 0; k < 6; ++k) r[std::size_t(k)] = Int64(random() >> (n % 2 ? 1 : 40));
    records.push_back(r);
  }
  expect_same(philox_rules, records, [](const Record& r) -> Result {
    const PhiloxKey key = dropout_key(UInt64(r[0]), UInt64(r[1]));
    const Philox4 block = dropout_block(key, r[2], r[3], r[4], r[5]);
    return {key.word[0],
            key.word[1],
            block.word[0],
            block.word[1],
            block.word[2],
            block.word[3],
            dropout_value(block, r[4], r[5]),
            0};
  });
}

TEST_F(Vulkan, EveryHalfWidensAndNumbersNarrow) {
  std::vector<Record> records;
  std::mt19937 random(9);
  for (Int64 n = 0; n < 65536; ++n) {
    const UInt32 any = random(), near_half = (UInt32(n) << 13) + 0x38000000u + (any & 0x3fffu) - 0x2000u;
    records.push_back({n % 2 ? any : near_half, n});
  }
  expect_same(type_rules, records, [](const Record& r) -> Result {
    const float x = float_of(r[0]);
    return {narrow<BF16>(x).bits,
            narrow<F16>(x).bits,
            bits_of(widen(F16{UInt16(r[1])})),
            bits_of(widen(BF16{UInt16(r[1])})),
            0,
            0,
            0,
            0};
  });
}

TEST_F(Vulkan, PlacesOfBlocks) {
  std::mt19937 random(10);
  for (int round = 0; round < 8; ++round) {
    const Int32 B = 1 + Int32(random() % 9);
    std::vector<Int32> cu{Int32(random() % 20)};
    for (Int32 b = 0; b < B; ++b) cu.push_back(cu.back() + Int32(random() % 70) * (random() % 3 != 0));
    const Int64 N = cu.back() + Int64(random() % 30);
    if (round % 2) cu[random() % cu.size()] = Int32(random() % 400) - 100;  // in disorder
    const VulkanMemory lengths(cu.size() * 4);
    lengths.upload(cu.data(), cu.size() * 4);
    std::vector<Record> records;
    for (Int64 rows : {32, 64})
      for (Int64 number = 0; number < gpu::block_count(true, N, rows, B); ++number)
        records.push_back({number, rows, B, N, reinterpret_cast<Int64>(lengths.data())});
    expect_same(place_rules, records, [&](const Record& r) -> Result {
      const gpu::LengthRef ref{cu.data(), 1};
      const gpu::BlockPlace at = gpu::place_of(r[0], r[1], B, N, ref);
      const Range rows = gpu::packed_rows(ref, at.b, N);
      return {at.b,
              at.first,
              rows.begin,
              rows.end,
              gpu::packed_begin(ref, at.b, N),
              gpu::finds_blocks(at.b, r[1], B, N, ref),
              gpu::block_count(true, N, r[1], B),
              0};
    });
  }
}

// Divisions in 32 bits, and, where numbers are larger, in 64.
TEST_F(Vulkan, PlacesOfBlocksInPaddedTensors) {
  std::vector<Record> records;
  std::mt19937_64 random(11);
  for (int n = 0; n < 4000; ++n)
    for (Int64 rows : {1, 32, 64}) {
      const Int64 N = 1 + Int64(random() >> (24 + random() % 40)), per_sequence = ceil_div(N, rows);
      const Int64 number = Int64(random() >> (24 + random() % 40)) % (per_sequence * 1000);
      records.push_back({number, rows, 1000, N});
    }
  for (Int64 edge : {Int64(1) << 31, Int64(1) << 32, Int64(1) << 62})
    for (Int64 a : {edge - 1, edge, edge + 1})
      for (Int64 b : {Int64(1), Int64(3), (Int64(1) << 31) - 1, Int64(1) << 31, edge - 1, edge, edge + 1})
        records.push_back({a, 1, 1, b});
  expect_same(padded_rules, records, [](const Record& r) -> Result {
    const gpu::BlockPlace at = gpu::place_of(r[0], r[1], Int32(r[2]), r[3], gpu::LengthRef{nullptr, 1});
    return {at.b, at.first, r[0] / r[3], r[0] % r[3], 0, 0, 0, 0};
  });
}

// The rule in f64.
struct Exact {
  using Number = double;
  static double set(double x) { return x; }
  static double multiply(double a, double b) { return a * b; }
  static double multiply_add(double a, double b, double c) { return a * b + c; }
  static double negative_multiply_add(double a, double b, double c) { return c - a * b; }
  static double abs(double x) { return std::abs(x); }
  static double tanh(double x) { return std::tanh(x); }
};
struct Pair {
  double d, b;
  double distance() const { return d; }
  double bias() const { return b; }
};

TEST_F(Vulkan, ScoresExponentialsAndLogarithms) {
  std::vector<Record> records;
  std::mt19937 random(11);
  const auto between = [&](float low, float high) { return std::uniform_real_distribution<float>(low, high)(random); };
  for (Int64 n = 0; n < 20000; ++n)
    records.push_back({n % 8, bits_of(between(-2, 2)), bits_of(between(0.5, 30)), bits_of(between(0, 1)),
                       bits_of(1.4426950408889634f), bits_of(float(Int64(random() % 2000) - 1000)),
                       bits_of(between(-5, 5)), bits_of(between(-40, 40) * (n % 3 ? 1.0f : 0.01f)),
                       bits_of(between(-140, 3)), bits_of(between(-300, 300)), bits_of(std::exp2(between(-20, 40)))});
  const std::vector<Result> found = on_device(score_rules, records);
  double worst_score = 0, worst_exp = 0, worst_lse = 0;
  for (std::size_t n = 0; n < records.size(); ++n) {
    const Record& r = records[n];
    const ScoreOptions options{.softcap = (r[0] & 1) != 0, .alibi = (r[0] & 2) != 0, .bias = (r[0] & 4) != 0};
    const ScoreNumbers<double> numbers =
        score_numbers<double>(options, float_of(r[1]), {float_of(r[2])}, float_of(r[3]), float_of(r[4]));
    const Pair pair{float_of(r[5]), float_of(r[6])};
    double derivative = 1;
    const double argument = float_of(r[7]) * numbers.factor;
    const double s_cap = ScoreRule<Exact>::capped(options, numbers, argument, pair, &derivative);
    const double score = ScoreRule<Exact>::placed(options, numbers, s_cap, pair);
    const double size = std::abs(argument) * (options.softcap ? numbers.cap : 1) +
                        (options.alibi ? std::abs(numbers.slope * pair.d) : 0) + std::abs(pair.b) * 2 + 1e-30;
    worst_score = std::max(worst_score, std::abs(float_of(found[n][0]) - score) / size);
    EXPECT_NEAR(float_of(found[n][1]), derivative, 1e-6);
    const double power = float_of(r[8]) < -126 ? 0 : std::exp2(double(float_of(r[8])));
    worst_exp = std::max(worst_exp, std::abs(float_of(found[n][2]) - power) / std::max(power, 1e-37));
    const double lse = float_of(r[9]) * std::log(2.0) + std::log(double(float_of(r[10])));
    const double spacing = std::exp2(std::floor(std::log2(std::abs(lse) + 1e-30)) - 24);
    worst_lse = std::max(worst_lse, (std::abs(float_of(found[n][3]) - lse) - spacing) * 0x1p24);
  }
  EXPECT_LT(worst_score, 4 * 0x1p-24);
  EXPECT_LT(worst_exp, 3 * 0x1p-24);
  EXPECT_LT(worst_lse, 2.0);  // beyond half a spacing, in units of 2^-24
}

}  // namespace
}  // namespace tessera::test
