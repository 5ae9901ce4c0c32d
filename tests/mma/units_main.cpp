// SPDX-License-Identifier: Apache-2.0
// Writes headers with the units that the planner gives to the cases of mma_cases.hpp, as functions for the emulated
// machine. Run while the tests that include them are built.
#include <iostream>

#include "tests/emulated/unit_functions.hpp"
#include "tests/mma/mma_paged_cases.hpp"

using namespace tessera;

// Of keys in one piece and in pages; of a batch, and of each of its sequences.
static bool add_paged_units(std::set<std::string>& units) {
  bool good = true;
  const auto add = [&](const Problem& problem, const char* architecture, const char* kernel) {
    const gpu::Steps steps = mma::serving_steps(problem, architecture, kernel);
    if (!steps.reason.empty()) std::cerr << kernel << " on " << architecture << ": " << steps.reason << "\n";
    good = good && steps.reason.empty();
    for (const gpu::Step& step : steps.list) units.insert(step.unit);
  };
  const auto paged = [](Problem problem) {
    problem.pages = Pages{.count = 9, .v_count = 9, .size = 16, .entries = 900};
    return problem;
  };
  for (const mma::PagedSpec& c : mma::paged_specs()) {
    cases::CaseData data = cases::build(c.spec);
    const Problem problem = mma::problem_of(mma::call_of(data));
    add(problem, c.architecture, "mma"), add(paged(problem), c.architecture, "mma");
  }
  for (const mma::PagedSpec& c : mma::eight_bit_specs()) {
    cases::CaseData data = cases::build(c.spec), wide = cases::build(mma::without_cache(c.spec));
    add(paged(mma::problem_of(mma::call_of(data))), c.architecture, "mma");
    add(mma::problem_of(mma::call_of(wide)), c.architecture, "mma");
  }
  for (const mma::PagedSpec& c : mma::mixed_specs) {
    cases::CaseData data = cases::build(c.spec);
    Problem problem = paged(mma::problem_of(mma::call_of(data)));
    add(problem, c.architecture, "mma_mixed");
    for (const std::int32_t queries : c.spec.packed_q) {
      problem.options.max_seqlen_q = queries;
      if (test::has_few_rows(c.spec, queries)) add(problem, c.architecture, "decode_queue");
    }
  }
  return good;
}

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  std::set<std::string> units, units_of_backward, units_of_one_pass, paged_units;
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
    for (int n = 1; n <= mma::most_turn_tiles; ++n)
      for (const gpu::Step& step : mma::one_pass_steps_of(mma::backward_problem(data), c.architecture, n).list)
        units_of_one_pass.insert(step.unit);
  }
  // Of test::LongRows: rows that are aligned, of head dims that are not.
  cases::CaseData odd = cases::build({.name = "odd", .D = 90, .Dv = 97, .type = Type::bf16, .backward = false});
  Problem aligned = mma::problem_of(mma::call_of(odd));
  aligned.alignment = 16;
  units.insert(mma::steps_of(aligned, "sm_90a").list.front().unit);
  if (!add_paged_units(paged_units)) return 1;
  const bool written = emulated::write_unit_functions(argv[1], "mma_units", units) &&
                       emulated::write_unit_functions(argv[2], "mma_backward_units", units_of_backward) &&
                       emulated::write_unit_functions(argv[3], "mma_one_pass_units", units_of_one_pass) &&
                       emulated::write_unit_functions(argv[4], "mma_paged_units", paged_units);
  return written ? 0 : 1;
}
