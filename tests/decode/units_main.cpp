// SPDX-License-Identifier: Apache-2.0
// Writes a header with the units that the planner gives to the cases of decode_cases.hpp, as functions for the emulated
// machine. Run while the tests that include it are built.
#include <iostream>

#include "tests/decode/direct_cases.hpp"
#include "tests/emulated/unit_functions.hpp"

using namespace tessera;

namespace {

using Units = std::set<std::string>;

// Multiprocessors decide about clusters alone.
bool add(Units& units, const cases::Case& spec, const char* architecture, bool paged, bool direct = false,
         std::int64_t room = 0) {
  const cases::CaseData data = cases::build(spec);
  Problem problem = check_forward(data.inputs(), data.outputs(), data.options(), {});
  problem.Nk = std::max(problem.Nk, room);
  if (paged) problem.pages = Pages{.count = 9, .v_count = 9, .size = 16, .entries = 9};
  std::vector<int> multiprocessors{cuda::target_named(architecture).multiprocessors};
  if (direct)
    for (const int count : decode::cluster_multiprocessors(problem)) multiprocessors.push_back(count);
  for (const bool roomy : {false, true})  // a table may have room for more than is used
    for (const int count : multiprocessors) {
      if (roomy && paged && direct) problem.Nk = 5 * decode::leaf_keys;
      const gpu::Steps steps = decode::steps_of(problem, decode::target_of(architecture, count), direct);
      for (const gpu::Step& step : steps.list) units.insert(step.unit);
      if (steps.reason.empty() || count != multiprocessors.front()) continue;  // few are too few for some
      std::cerr << cases::describe(spec) << ": " << steps.reason << "\n";
      return false;
    }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  Units units, cache_units;
  bool good = true;
  for (const decode::DecodeCase& c : decode::decode_cases()) good = good && add(units, c.spec, c.architecture, false);
  for (const decode::PagedShape& shape : decode::paged_shapes)
    good = good && add(units, decode::lone_sequence(shape.Nq, shape.group, shape.options), "sm_90a", true);
  for (const bool paged : {false, true}) {
    good = good && add(units, decode::lone_sequence(1, 3, true), "sm_90a", paged);
    good = good && add(cache_units, decode::lone_sequence(1, 3, false), "sm_90a", paged);
    good = good && add(cache_units, decode::lone_sequence_of_bytes(), "sm_90a", paged);
  }
  for (const cases::Case& spec : decode::short_sequences()) {
    good = good && add(units, spec, "sm_90a", false);
    good = good && add(units, spec, "sm_90a", false, false, decode::much_room);
  }
  for (const bool direct : {false, true}) {
    for (const decode::DecodeCase& c : decode::direct_cases())
      good = good && add(units, c.spec, c.architecture, false, direct);
    cases::Case paged = decode::with_rows("Direct", 1, 3, 700);
    paged.D = 128, paged.B = 4, paged.type = Type::bf16;
    good = good && add(units, paged, "sm_90a", true, direct);
    for (const decode::DecodeCase& c : decode::direct_cache_cases())
      good = good && add(cache_units, c.spec, c.architecture, false, direct);
  }
  for (const std::int64_t Dv : {128, 256})
    good = good && add(cache_units, decode::grouped_sequence(Dv), "sm_90a", Dv == 256);
  good = good && add(cache_units, decode::grouped_sequence(256), "sm_90a", false);
  for (const decode::DecodeCase& c : decode::decode_cache_cases())
    good = good && add(cache_units, c.spec, c.architecture, false);
  good = good && emulated::write_unit_functions(argv[1], "decode_units", units);
  return good && emulated::write_unit_functions(argv[2], "decode_units", cache_units) ? 0 : 1;
}
