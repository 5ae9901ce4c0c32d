// Writes a header with the units that the planner gives to the cases of mma_cases.hpp, as functions for the emulated
// machine. Run while mma_machine_test is built.
#include <iostream>

#include "tests/emulated/unit_functions.hpp"
#include "tests/mma/mma_cases.hpp"

using namespace tessera;

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  std::set<std::string> units;
  for (const mma::MmaCase& c : mma::mma_cases()) {
    cases::CaseData data = cases::build(c.spec);
    const gpu::Steps steps = mma::steps_of(mma::problem_of(mma::call_of(data)), c.architecture);
    if (!steps.reason.empty()) {
      std::cerr << cases::describe(c.spec) << ": " << steps.reason << "\n";
      return 1;
    }
    for (const gpu::Step& step : steps.list) units.insert(step.unit);
  }
  // Of test::LongRows: rows that are aligned, of head dims that are not.
  cases::CaseData odd = cases::build({.D = 90, .Dv = 97, .type = Type::bf16, .backward = false});
  Problem aligned = mma::problem_of(mma::call_of(odd));
  aligned.alignment = 16;
  units.insert(mma::steps_of(aligned, "sm_90a").list.front().unit);
  return emulated::write_unit_functions(argv[1], "mma_units", units) ? 0 : 1;
}
