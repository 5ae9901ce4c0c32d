// SPDX-License-Identifier: Apache-2.0
// Writes a header with the units that the ladder's planners give to the cases of ladder_cases.hpp, as functions for the
// emulated machine. Run while ladder_test is built.
#include "tests/emulated/unit_functions.hpp"
#include "tests/ladder/ladder_cases.hpp"

using namespace tessera;

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  std::set<std::string> units;
  for (const cases::Case& spec : ladder::ladder_cases()) {
    cases::CaseData data = cases::build(spec);
    for (const Pass pass : {Pass::forward, Pass::backward})
      for (const gpu::Algorithm& rung : ladder::emulated_rungs())
        for (const gpu::Step& step :
             rung.plan(ladder::problem_of(ladder::call_of(data, pass), pass), ladder::emulated_target()).list)
          units.insert(step.unit);
  }
  return emulated::write_unit_functions(argv[1], "ladder_units", units) ? 0 : 1;
}
