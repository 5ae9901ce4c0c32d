// SPDX-License-Identifier: Apache-2.0
// Writes headers with the units that the planner gives to the cases of mma_cases.hpp, as functions for the emulated
// machine. Run while the tests that include them are built.
#include <iostream>

#include "tests/emulated/unit_functions.hpp"
#include "tests/mma/mma_cases.hpp"

using namespace tessera;

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  std::set<std::string> units, units_of_backward, units_of_one_pass;
  for (const mma::MmaCase& c : mma::mma_cases()) {
    cases::CaseData data = cases::build(c.spec);
    const gpu::Steps steps = mma::steps_of(mma::problem_of(mma::call_of(data)), c.architecture);
    if (!steps.reason.empty()) {
      std::cerr << cases::describe(c.spec) << ": " << steps.reason << "\n";
      return 1;
    }
    for (const gpu::Step& step : steps.list) units.insert(step.unit);
  }
  for (const mma::MmaBackwardCase& c : mma::mma_backward_cases()) {
    cases::CaseData data = cases::build(c.c.spec);
    const gpu::Steps steps = mma::steps_of(mma::backward_problem(data), c.architecture);
    if (!steps.reason.empty()) {
      std::cerr << cases::describe(c.c.spec) << ": " << steps.reason << "\n";
      return 1;
    }
    for (const gpu::Step& step : steps.list) units_of_backward.insert(step.unit);
  }
  for (const mma::OnePassCase& c : mma::one_pass_cases()) {
    cases::CaseData data = cases::build(c.c.spec);
    for (const gpu::Step& step : mma::steps_of(mma::backward_problem(data), c.architecture, "mma_one_pass").list)
      units_of_one_pass.insert(step.unit);
  }
  // Of test::LongRows: rows that are aligned, of head dims that are not.
  cases::CaseData odd = cases::build({.name = "odd", .D = 90, .Dv = 97, .type = Type::bf16, .backward = false});
  Problem aligned = mma::problem_of(mma::call_of(odd));
  aligned.alignment = 16;
  units.insert(mma::steps_of(aligned, "sm_90a").list.front().unit);
  const bool written = emulated::write_unit_functions(argv[1], "mma_units", units) &&
                       emulated::write_unit_functions(argv[2], "mma_backward_units", units_of_backward) &&
                       emulated::write_unit_functions(argv[3], "mma_one_pass_units", units_of_one_pass);
  return written ? 0 : 1;
}
