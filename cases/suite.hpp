// SPDX-License-Identifier: Apache-2.0
// Runs cases against float64 and gathers what came out: the engine of `tessera check` and of the case tests.
// Included by tests/ and cli/check.cpp. Implements the accuracy promise of docs/numerics.md.
//
// Use by a command:
//   std::vector<Case> cases = name == "random" ? random_cases(seed, count) : suite(name);   // or suite("all")
//   Execution e;  e.kernel = ...;                                       // nullptr: the best kernel of this machine
//   SuiteReport r = run_suite(cases, e, [&](const CaseReport& c, std::size_t done, std::size_t total) {
//     progress(done, total);  if (!c.ok) print(to_text(c));             // to_text ends with the reproducing command
//   });
//   print(worst_table(r));  exit(r.ok() ? 0 : 1);
// A single table case is run with --case NAME: find_case(NAME). Random case n of seed S is `--seed S+n --count 1`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cases/case.hpp"
#include "tessera/tessera.hpp"

namespace tessera::cases {

// One output tensor against float64. error and allowed are Frobenius norms (LSE: the worst element over its bound).
struct OutputReport {
  std::string name;  // "o", "lse", "dq", "dk", "dv", "dbias", "dsinks"
  Type type = Type::f32;
  double error = 0, allowed = 0;     // allowed: without the underflow term
  double underflow = 0;              // |U|: what may be lost besides, because P or a product is below f32's range
  double model_error = 0, norm = 0;  // |Xmodel - X64| and |X64|
  bool ok = true;
  std::string worst;   // index of the element that is furthest off, e.g. "[0,17,2,5]", with its two values
  std::string detail;  // why it is not ok; empty otherwise

  // Of what underflow does not explain.
  double ratio() const {
    const double rest = error - underflow;
    return rest <= 0 ? 0 : allowed > 0 ? rest / allowed : 1e300;
  }
  bool needs_underflow() const { return error > allowed; }
};

struct CaseReport {
  std::string name;
  std::string text;       // describe(case): shapes and options on one line
  std::string kernel;     // the kernel that ran the forward pass
  std::string reproduce;  // a command
  bool ok = true;
  bool skipped = false;  // the kernel does not exist on this machine or does not take the type; messages say why
  std::vector<OutputReport> outputs;
  std::vector<std::string> messages;
  double seconds = 0;
};

struct SuiteReport {
  std::vector<CaseReport> cases;
  std::size_t passed = 0, failed = 0, skipped = 0;
  bool ok() const { return failed == 0; }
};

// Forward and backward of one case, every output compared, every margin checked. Throws nothing: an exception of the
// library becomes a failed report, TESSERA_UNSUPPORTED a skipped one.
CaseReport run_case(const Case& spec, const Execution& execution = {});
// The same for several kernels or thread counts; the float64 expectation is computed once.
std::vector<CaseReport> run_case(const Case& spec, const std::vector<Execution>& executions);

using Finished = std::function<void(const CaseReport& report, std::size_t done, std::size_t total)>;
SuiteReport run_suite(const std::vector<Case>& cases, const Execution& execution = {}, const Finished& finished = {});

// "regular", "features", "corner", "caches", "performance", or "all" (the first three, which GPUs run too). Throws
// std::invalid_argument.
std::vector<Case> suite(const std::string& name);
// A case of any table by its name; throws std::invalid_argument.
Case find_case(const std::string& name);

// "reference" and the CPU's instruction sets, or the names that the environment's TESSERA_TEST_KERNELS lists: those
// that run here. Throws std::runtime_error if there is none: a test that runs no kernel must not pass.
std::vector<std::string> available_kernels();

std::string to_text(const CaseReport& report);  // several lines: name, text, every output, messages, command
// How many cases pass by the rule's underflow term only.
std::size_t underflowed(const SuiteReport& report);
// Worst ratio of error to the allowed error, a row per output and a column per type, with the case that has it; and
// the number above.
std::string worst_table(const SuiteReport& report);

}  // namespace tessera::cases
