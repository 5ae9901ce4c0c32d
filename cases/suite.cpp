// SPDX-License-Identifier: Apache-2.0
// Suites by name, cases by name, and a run over many of them.
// Part of tessera_cases; see suite.hpp.
// Implements the accuracy promise of docs/numerics.md.
#include "cases/suite.hpp"

#include <cstdlib>
#include <iterator>
#include <sstream>
#include <stdexcept>

#include "cases/tables.hpp"

namespace tessera::cases {

SuiteReport run_suite(const std::vector<Case>& cases, const Execution& execution, const Finished& finished) {
  SuiteReport report;
  for (const Case& spec : cases) {
    report.cases.push_back(run_case(spec, execution));
    const CaseReport& last = report.cases.back();
    ++(last.skipped ? report.skipped : last.ok ? report.passed : report.failed);
    if (finished) finished(last, report.cases.size(), cases.size());
  }
  return report;
}

std::vector<Case> suite(const std::string& name) {
  if (name == "regular") return regular();
  if (name == "features") return features();
  if (name == "corner") return corner();
  if (name == "caches") return caches();
  if (name == "performance") return performance();
  if (name != "all")
    throw std::invalid_argument("suite: is '" + name + "'; must be regular, features, corner, caches, " +
                                "performance, random, random_small, random_caches or all");
  std::vector<Case> all;
  for (const auto& table : {regular(), features(), corner()}) all.insert(all.end(), table.begin(), table.end());
  return all;
}

Case find_case(const std::string& name) {
  for (const char* table : {"all", "caches", "performance"})
    for (const Case& spec : suite(table))
      if (spec.name == name) return spec;
  throw std::invalid_argument("case: there is no case named '" + name + "' in the tables");
}

std::vector<std::string> available_kernels() {
  std::vector<std::string> names;
#if defined(__aarch64__)
  std::vector<std::string> wanted{"reference", "neon"};
#else
  std::vector<std::string> wanted{"reference", "sse4", "avx2", "avx512", "avx512bf16", "amx"};
#endif
  if (const char* chosen = std::getenv("TESSERA_TEST_KERNELS")) {
    std::istringstream words{chosen};
    wanted.assign(std::istream_iterator<std::string>(words), {});
  }
  const CaseData tiny = build({.name = "tiny", .Nq = 1, .Nk = 1, .D = 1});
  for (const std::string& name : wanted) {
    try {
      Plan::forward(tiny.inputs(), tiny.outputs(), {}, {.kernel = name.c_str()});
      names.push_back(name);
    } catch (const Error& error) {
      if (error.status() != TESSERA_UNSUPPORTED) throw;  // a real error, not a kernel that this machine lacks
    }
  }
  if (names.empty()) throw std::runtime_error("TESSERA_TEST_KERNELS: no kernel that it names runs on this machine");
  return names;
}

}  // namespace tessera::cases
