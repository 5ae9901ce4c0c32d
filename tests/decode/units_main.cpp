// SPDX-License-Identifier: Apache-2.0
// Writes a header with the units that the planner gives to the cases of decode_cases.hpp, as functions for the emulated
// machine. Run while the tests that include it are built.
#include <iostream>

#include "tests/decode/decode_cases.hpp"
#include "tests/emulated/unit_functions.hpp"

using namespace tessera;

namespace {

std::set<std::string> units;

// Multiprocessors decide about no unit.
bool add(const cases::Case& spec, const char* architecture, bool paged) {
  const cases::CaseData data = cases::build(spec);
  Problem problem = check_forward(data.inputs(), data.outputs(), data.options(), {});
  if (paged) problem.pages = Pages{.count = 9, .v_count = 9, .size = 16, .entries = 9};
  const gpu::Steps steps = decode::steps_of(problem, cuda::target_named(architecture));
  if (!steps.reason.empty()) std::cerr << cases::describe(spec) << ": " << steps.reason << "\n";
  for (const gpu::Step& step : steps.list) units.insert(step.unit);
  return steps.reason.empty();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  for (const decode::DecodeCase& c : decode::decode_cases())
    if (!add(c.spec, c.architecture, false)) return 1;
  for (const decode::PagedShape& shape : decode::paged_shapes)
    if (!add(decode::lone_sequence(shape.Nq, shape.group, shape.options), "sm_90a", true)) return 1;
  for (const bool paged : {false, true})
    if (!add(decode::lone_sequence(1, 3, true), "sm_90a", paged)) return 1;
  return emulated::write_unit_functions(argv[1], "decode_units", units) ? 0 : 1;
}
