// SPDX-License-Identifier: Apache-2.0
// Writes headers of the tiles that the planner gives to the cases of cases.hpp, part_cases.hpp and backward_cases.hpp:
// constants, since device code is specialised by them. Run while the tests of the emulated machine are built, so that
// they follow the planner.
#include <fstream>
#include <iostream>
#include <set>
#include <string>

#include "core/check.hpp"
#include "cuda/device.hpp"
#include "sm90/plan.hpp"
#include "sm90/unit.hpp"
#include "tests/emulated/backward_cases.hpp"
#include "tests/emulated/cases.hpp"
#include "tests/emulated/part_cases.hpp"

using namespace tessera;

using Tiles = std::set<std::string>;

// The configuration as a unit spells it: "type{...}".
static std::string spelled(const char* type, const std::string& unit) {
  const std::string word = "config{";
  const std::size_t begin = unit.find(word) + word.size();
  std::string out = type;
  out += "{";
  out += unit.substr(begin, unit.find(';', begin) - begin);
  return out;
}

static void expect_plan(const cases::Case& c, const std::string& reason) {
  if (reason.empty()) return;
  std::cerr << cases::describe(c) << ": " << reason << "\n";
  std::exit(1);
}

// Of calls that end with O and, if their rows are carried, of those that end with a state.
static Tiles forward_tiles(const std::vector<emulated::EmulatedCase>& cases) {
  Tiles tiles;
  for (const emulated::EmulatedCase& c : cases) {
    const cases::CaseData data = cases::build(c.spec);
    Problem problem = check_forward(data.inputs(), data.outputs(), data.options(), {});
    for (const bool state_out : {false, problem.carried()}) {
      problem.state_out = state_out;
      const sm90::ForwardPlan plan = sm90::plan_forward(problem, cuda::target_named("sm_90a"));
      expect_plan(c.spec, plan.reason);
      tiles.insert(spelled("tessera::sm90::Config", sm90::forward_unit_text(plan.config)));
    }
  }
  return tiles;
}

static Tiles backward_tiles() {
  Tiles tiles;
  for (const emulated::BackwardCase& c : emulated::backward_cases()) {
    const cases::CaseData data = cases::build(c.spec);
    const Problem problem = check_backward(data.inputs(), data.saved(), data.gradients(), data.options(), {});
    const sm90::BackwardPlan plan = sm90::plan_backward(problem, cuda::target_named("sm_90a"));
    expect_plan(c.spec, plan.reason);
    for (const sm90::BackwardPlan::Pass& pass : plan.passes)
      tiles.insert(spelled("tessera::sm90::BackwardConfig", sm90::backward_unit_text(pass.config)));
  }
  return tiles;
}

static bool write(const std::string& path, const char* macro, const Tiles& tiles) {
  std::ofstream out(path);
  out << "// Tiles that sm90/tiles.cpp gives to the cases of tests/emulated. Written by tiles_main.cpp.\n#define "
      << macro;
  const char* separator = " \\\n  ";
  for (const std::string& tile : tiles) {
    out << separator << "(" << tile << ")";
    separator = ", \\\n  ";
  }
  out << "\n";
  return out.good();
}

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const bool written = write(argv[1], "HOPPER_TILES", forward_tiles(emulated::emulated_cases())) &&
                       write(argv[2], "HOPPER_BACKWARD_TILES", backward_tiles()) &&
                       write(argv[3], "HOPPER_PART_TILES", forward_tiles(emulated::part_cases()));
  return written ? 0 : 1;
}
