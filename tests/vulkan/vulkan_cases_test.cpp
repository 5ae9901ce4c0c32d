// SPDX-License-Identifier: Apache-2.0
// The tables and random configurations on the Vulkan kernels, against float64, on the first device: in CI Debian's
// lavapipe, with the validation layers on. Cases on vk_tiled, a share on vk_naive. Of the random ones 2,000 are small,
// around tiles of 32: begun tiles cost as much as whole ones on a processor that plays GPU, and so ten of these cost
// what one of the others does.
// Links tessera_cases. Implements docs/numerics.md, "Suites".
#include <iostream>

#include "cases/random.hpp"
#include "tests/vulkan/support.hpp"

namespace tessera::test {
namespace {

double pairs(const Case& c) {
  double sum = c.packed() ? 0 : static_cast<double>(c.B * c.Nq * c.Nk);
  for (std::size_t b = 0; b < c.packed_q.size(); ++b) sum += 1.0 * c.packed_q[b] * c.packed_k[b];
  return sum * static_cast<double>(c.Hq) * static_cast<double>(c.D + c.dim_v());
}

struct Part {
  const char* suite;
  std::size_t number, count;
  const char* kernel;
  double most_pairs;      // larger cases are left out: this device is a processor
  std::size_t least = 6;  // cases that must have passed
};
constexpr std::size_t small_cases = 2100;  // about 3 % are refused: their loops might be endless

std::vector<Case> cases_of(const std::string& name) {
  if (name == "random") return random_cases(20260, 200);
  if (name == "random_small") return random_small_cases(500000, small_cases);
  return suite(name);
}
void PrintTo(const Part& part, std::ostream* out) {
  *out << part.suite << " part " << part.number << " on " << part.kernel;
}

class VulkanCases : public VulkanWith<Part> {};

TEST_P(VulkanCases, AgreeWithFloat64) {
  const Part part = GetParam();
  const std::vector<Case> all_cases = cases_of(part.suite);
  SuiteReport all;
  std::size_t refused_loops = 0, refused_others = 0;
  for (std::size_t n = part.number; n < all_cases.size(); n += part.count) {
    if (all_cases[n].type == Type::f64 || pairs(all_cases[n]) > part.most_pairs) continue;
    const CaseReport report = run_case(all_cases[n], Execution{.device = vulkan_device, .kernel = part.kernel});
    expect_ok(report);
    ++(report.skipped ? all.skipped : report.ok ? all.passed : all.failed);
    all.cases.push_back(report);
    if (!report.skipped) continue;
    const std::string why = report.messages.empty() ? "" : report.messages.front();
    ++(why.find("rounds of loops") != std::string::npos ? refused_loops : refused_others);
    if (why.find("rounds of loops") == std::string::npos && why.find("head_dim is") == std::string::npos)
      ADD_FAILURE() << "refused: " << report.name << ": " << why;
  }
  std::cout << part.suite << " on " << part.kernel << ": " << all.passed << " passed, " << refused_loops
            << " refused for their loops, " << refused_others << " for their dims\n"
            << worst_table(all) << std::flush;
  EXPECT_GE(all.passed, part.least);
}

// In the order of two shards that take as long as each other.
INSTANTIATE_TEST_SUITE_P(
    All, VulkanCases,
    testing::Values(Part{"features", 0, 2, "vk_tiled", 4e7, 80}, Part{"features", 1, 2, "vk_tiled", 4e7, 80},
                    Part{"random_small", 0, 2, "vk_tiled", 1e9, 1000},
                    Part{"random_small", 1, 2, "vk_tiled", 1e9, 1000}, Part{"regular", 0, 1, "vk_tiled", 1e7},
                    Part{"corner", 0, 1, "vk_tiled", 2e6, 190}, Part{"random", 0, 4, "vk_tiled", 1e6},
                    Part{"random_small", 7, 10, "vk_naive", 1e9, 190}, Part{"corner", 0, 6, "vk_naive", 1e6}));

// Every pair of options that can meet does, in the small ones.
TEST(VulkanCases, SmallOnesHaveEveryPairOfOptions) {
  EXPECT_EQ(count_pairs(cases_of("random_small")).missing(), std::vector<std::string>{});
}

// A broadcast V and a scale of 0: hundreds of equal terms, which a single chain of additions rounds the same way.
class VulkanSums : public VulkanWith<const char*> {};

TEST_P(VulkanSums, EqualTermsStayExact) {
  const CaseReport report = run_case(random_case(20490), Execution{.device = vulkan_device, .kernel = GetParam()});
  expect_ok(report);
  EXPECT_FALSE(report.skipped);
}

INSTANTIATE_TEST_SUITE_P(All, VulkanSums, testing::Values("vk_tiled", "vk_naive"));

}  // namespace
}  // namespace tessera::test
