// SPDX-License-Identifier: Apache-2.0
// At least 500 random configurations per run, kernels taking turns, and the proof that all options met.
// Links tessera_cases. TESSERA_TEST_SEED chooses other configurations.
// Implements docs/numerics.md, "Random configurations".
#include <cstdlib>
#include <iostream>

#include "cases/random.hpp"
#include "cases/tiles.hpp"
#include "tests/support/support.hpp"

namespace tessera::test {
namespace {

constexpr std::size_t configurations = 504, parts = 8;

std::uint64_t first_seed() {
  const char* chosen = std::getenv("TESSERA_TEST_SEED");
  return chosen ? std::strtoull(chosen, nullptr, 10) : 20260;
}

class Random : public testing::TestWithParam<std::size_t> {};

TEST_P(Random, AgreesWithFloat64) {
  std::vector<std::string> kernels = cpu_kernels();
  const bool only_these =
      available_kernels().size() == kernels.size();  // TESSERA_TEST_KERNELS leaves out the reference
  kernels.push_back("reference");
  SuiteReport all;
  for (std::size_t n = GetParam(); n < configurations; n += parts) {
    const std::string& kernel = kernels[n / parts % kernels.size()];
    if (only_these && kernel == "reference") continue;
    const CaseReport report = run_case(random_case(first_seed() + n), Execution{.kernel = kernel.c_str()});
    expect_ok(report);
    ++(report.skipped ? all.skipped : report.ok ? all.passed : all.failed);
    all.cases.push_back(report);
  }
  std::cout << "seeds " << first_seed() + GetParam() << " and every " << parts << "th after it\n" << worst_table(all);
  EXPECT_EQ(all.skipped, 0U);
}

INSTANTIATE_TEST_SUITE_P(All, Random, testing::Range(std::size_t{0}, parts));

TEST(RandomCaches, AgreeWithFloat64) {
  const std::vector<std::string> kernels = available_kernels();
  int decoding = 0, types = 0;
  for (std::uint64_t seed = first_seed(); seed < first_seed() + 210; ++seed) {
    const Case spec = random_cache_case(seed);
    expect_ok(run_case(spec, Execution{.kernel = kernels[seed % kernels.size()].c_str()}));
    decoding += !spec.packed() && spec.Nq <= 8, types += spec.k_type() != spec.v_type();
  }
  EXPECT_GE(decoding, 60);
  EXPECT_GE(types, 60);
  EXPECT_EQ(reproduce(random_cache_case(7)), "tessera check --suite random_caches --seed 7 --count 1");
  EXPECT_EQ(reproduce(random_small_case(7)), "tessera check --suite random_small --seed 7 --count 1");
}

TEST(RandomPairs, EveryPairOfOptionsMeets) {
  const std::vector<Case> cases = random_cases(first_seed(), configurations);
  const PairCounts pairs = count_pairs(cases);
  std::cout << "seed " << first_seed() << ", " << configurations
            << " configurations; all of them: tessera check --suite "
            << "random --seed " << first_seed() << " --count " << configurations << "\n"
            << to_text(pairs);
  for (const std::string& pair : pairs.missing()) ADD_FAILURE() << pair << " never meet";
  for (const Case& c : cases) EXPECT_GE(active_options(c).size(), 3U) << describe(c);
}

TEST(RandomPairs, LengthsGoBeyondTwoTilesBothWays) {
  int both = 0;
  for (const Case& c : random_cases(first_seed(), configurations))
    both += !c.packed() && c.Nq > 2 * tile_q && c.Nk > 2 * tile_k;
  EXPECT_GE(both, 20);
}

TEST(RandomPairs, SomeGoToTheLimits) {
  int endless = 0, far = 0, empty = 0, without_heads = 0;
  for (const Case& c : random_cases(first_seed(), configurations)) {
    endless += c.endless_k > 0, far += c.options.row0 > std::int64_t{1} << 40;
    empty += !c.packed() && c.B * c.Nq * c.Nk == 0, without_heads += c.Hq == 0;
  }
  for (int count : {endless, far, empty, without_heads}) EXPECT_GE(count, 3);
}

TEST(RandomPairs, ACaseIsAFunctionOfItsOwnSeed) {
  EXPECT_EQ(describe(random_cases(100, 8)[7]), describe(random_case(107)));
  EXPECT_NE(describe(random_case(100)), describe(random_case(101)));
  EXPECT_EQ(reproduce(random_case(107)), "tessera check --suite random --seed 107 --count 1");
}

}  // namespace
}  // namespace tessera::test
