// SPDX-License-Identifier: Apache-2.0
// Every row of the tables on every kernel that this machine has, against float64.
// Links tessera_cases; `tessera check --suite all` runs the same rows.
// Implements docs/numerics.md, "Suites".
#include <iostream>

#include "tests/support/support.hpp"

namespace tessera::test {
namespace {

// A table is cut into parts that are tests of their own, so that ctest can run them side by side.
struct Part {
  const char* suite;
  int number, count;
};

void PrintTo(const Part& part, std::ostream* out) { *out << part.suite << " part " << part.number; }

class Tables : public testing::TestWithParam<Part> {};

TEST_P(Tables, AgreeWithFloat64) {
  const Part part = GetParam();
  const std::vector<std::string> kernels = available_kernels();
  std::vector<Execution> executions;
  for (const std::string& kernel : kernels) executions.push_back({.kernel = kernel.c_str()});

  SuiteReport all;
  const std::vector<Case> cases = suite(part.suite);
  for (std::size_t n = static_cast<std::size_t>(part.number); n < cases.size();
       n += static_cast<std::size_t>(part.count))
    for (const CaseReport& report : run_case(cases[n], executions)) {
      expect_ok(report);
      ++(report.skipped ? all.skipped : report.ok ? all.passed : all.failed);
      all.cases.push_back(report);
    }
  std::cout << worst_table(all);
  EXPECT_EQ(all.skipped, 0U) << "a kernel of this machine refused a case";
}

INSTANTIATE_TEST_SUITE_P(All, Tables,
                         testing::Values(Part{"regular", 0, 2}, Part{"features", 0, 4}, Part{"features", 1, 4},
                                         Part{"corner", 0, 4}, Part{"regular", 1, 2}, Part{"features", 2, 4},
                                         Part{"features", 3, 4}, Part{"corner", 1, 4}, Part{"corner", 2, 4},
                                         Part{"corner", 3, 4}, Part{"caches", 0, 2}, Part{"caches", 1, 2}));

}  // namespace
}  // namespace tessera::test
