// SPDX-License-Identifier: Apache-2.0
// Writes a header with the units that the planner gives to the cases of sm90_paged_cases.hpp, as functions for the
// emulated machine. Run while the test that includes it is built.
#include <iostream>

#include "tests/emulated/unit_functions.hpp"
#include "tests/sm90/sm90_paged_cases.hpp"

using namespace tessera;

// Of keys in one piece and in pages; of a batch, and of each of its sequences.
int main(int argc, char** argv) {
  if (argc != 2) return 2;
  std::set<std::string> units;
  bool good = true;
  const auto add = [&](const Problem& problem, const char* kernel) {
    const gpu::Steps steps = sm90::serving_steps(problem, kernel);
    if (!steps.reason.empty()) std::cerr << kernel << ": " << steps.reason << "\n";
    good = good && steps.reason.empty();
    for (const gpu::Step& step : steps.list) units.insert(step.unit);
  };
  const auto paged = [](Problem problem) {
    problem.pages = sm90::pages_of(16);
    return problem;
  };
  for (const cases::Case& spec : sm90::paged_specs()) {
    cases::CaseData data = cases::build(spec);
    const Problem problem = sm90::problem_of(test::Prefill::call_of(data));
    add(problem, "hopper"), add(paged(problem), "hopper");
  }
  for (const cases::Case& spec : sm90::mixed_specs) {
    cases::CaseData data = cases::build(spec);
    Problem problem = paged(sm90::problem_of(test::Prefill::call_of(data)));
    add(problem, "hopper_mixed");
    for (const std::int32_t queries : spec.packed_q) {
      problem.options.max_seqlen_q = queries;
      if (test::has_few_rows(spec, queries)) add(problem, "decode_queue");
    }
  }
  return good && emulated::write_unit_functions(argv[1], "hopper_paged_units", units) ? 0 : 1;
}
