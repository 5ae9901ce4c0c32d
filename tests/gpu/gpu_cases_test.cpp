// SPDX-License-Identifier: Apache-2.0
// Every row of the tables and random configurations on every rung of the GPU ladder, against float64.
// Links tessera_cases; `tessera check --device cuda --kernel NAME` runs the same. TESSERA_TEST_SEED chooses other
// random configurations. Implements docs/numerics.md, "Suites".
#include <cstdlib>
#include <iostream>
#include <map>

#include "cases/random.hpp"
#include "tests/gpu/support.hpp"

namespace tessera::test {
namespace {

constexpr std::size_t parts = 28, configurations = 336;
constexpr std::size_t variants_every =
    3;                                  // of the cases are given to all rungs that take everything, not only the best
constexpr std::size_t plain_every = 3;  // of the random ones are also given to the early rungs, made plain

std::uint64_t first_seed() {
  const char* chosen = std::getenv("TESSERA_TEST_SEED");
  return chosen ? std::strtoull(chosen, nullptr, 10) : 41000;
}

// What came of a part's cases: how many ran on each rung, and why others did not.
class Tally {
 public:
  void count(const CaseReport& report, const std::string& rung) {
    expect_ok(report);
    ++(report.skipped ? all.skipped : report.ok ? all.passed : all.failed);
    all.cases.push_back(report);
    if (report.skipped)
      ++refusals[report.messages.front()];
    else
      ++ran[rung];
  }
  void print() const {
    for (const auto& [rung, cases] : ran) std::cout << rung << " ran " << cases << " cases\n";
    for (const auto& [reason, cases] : refusals) std::cout << cases << " times: " << reason << "\n";
    std::cout << worst_table(all);
  }
  std::size_t runs(const std::string& rung) { return ran[rung]; }

 private:
  SuiteReport all;
  std::map<std::string, std::size_t> ran, refusals;
};

// Nothing may be refused. The variants of the best rung take turns: they share most of their text.
void run_on_general_rungs(const Case& spec, std::size_t turn, Tally& tally) {
  std::vector<std::string> rungs = general_rungs();
  if (turn % variants_every != 0) rungs.resize(1);
  std::vector<Execution> executions;
  for (const std::string& rung : rungs) executions.push_back({.device = gpu, .kernel = rung.c_str()});
  const std::vector<CaseReport> reports = run_case(spec, executions);
  for (std::size_t n = 0; n < reports.size(); ++n) {
    EXPECT_FALSE(reports[n].skipped) << to_text(reports[n]);
    tally.count(reports[n], rungs[n]);
  }
}

// `tiled` adds atomically in its backward pass, and has to be allowed to; the others are not changed by it.
void run_on_early_rungs(Case spec, Tally& tally) {
  spec.options.deterministic = false;
  std::vector<Execution> executions;
  for (const char* rung : early_rungs) executions.push_back({.device = gpu, .kernel = rung});
  const std::vector<CaseReport> reports = run_case(spec, executions);
  for (std::size_t n = 0; n < reports.size(); ++n) tally.count(reports[n], early_rungs[n]);
}

// A test in which nearly everything was refused has shown nothing.
void expect_early_rungs_ran(Tally& tally, std::size_t plain) {
  for (const char* rung : early_rungs) EXPECT_GE(2 * tally.runs(rung), plain) << rung;
}

class GpuLadder : public Gpu {};

TEST_F(GpuLadder, HasItsRungs) {
  const std::vector<std::string> rungs = all_rungs();
  EXPECT_EQ(rungs.front(), vector_rung);
  for (const char* early : early_rungs) EXPECT_EQ(std::count(rungs.begin(), rungs.end(), early), 1) << early;
}

class GpuTables : public GpuWith<std::size_t> {};

TEST_P(GpuTables, AgreeWithFloat64) {
  Tally tally;
  std::size_t plain = 0;
  const std::vector<Case> cases = suite("all");
  for (std::size_t n = GetParam(); n < cases.size(); n += parts) {
    run_on_general_rungs(cases[n], n / parts, tally);
    run_on_early_rungs(cases[n], tally);
    plain += is_plain(cases[n]);
  }
  tally.print();
  EXPECT_GE(plain, 5U) << "the tables have changed: choose other parts";
  expect_early_rungs_ran(tally, plain);
}

INSTANTIATE_TEST_SUITE_P(All, GpuTables, testing::Range(std::size_t{0}, parts));

class GpuRandom : public GpuWith<std::size_t> {};

TEST_P(GpuRandom, AgreesWithFloat64) {
  Tally tally;
  std::size_t plain = 0;
  for (std::size_t n = GetParam(); n < configurations; n += parts) {
    const Case spec = random_case(first_seed() + n);
    run_on_general_rungs(spec, n / parts, tally);
    if (n / parts % plain_every != 0) continue;
    run_on_early_rungs(made_plain(spec), tally);
    ++plain;
  }
  std::cout << "seeds " << first_seed() + GetParam() << " and every " << parts << "th after it\n";
  tally.print();
  expect_early_rungs_ran(tally, plain);
}

INSTANTIATE_TEST_SUITE_P(All, GpuRandom, testing::Range(std::size_t{0}, parts));

}  // namespace
}  // namespace tessera::test
