// Writes the header of tiles that the planner gives to the cases of cases.hpp: constants, since device text is
// specialised by them. Run while tests/sm90_machine_test is built, so that the test follows the planner.
#include <fstream>
#include <iostream>
#include <set>
#include <string>

#include "core/check.hpp"
#include "cuda/device.hpp"
#include "sm90/plan.hpp"
#include "sm90/unit.hpp"
#include "tests/emulated/cases.hpp"

using namespace tessera;

// The configuration as a unit spells it: "tessera::sm90::Config{...}".
static std::string spelled(const sm90::Config& config) {
  const std::string unit = sm90::forward_unit_text(config), word = "config{";
  const std::size_t begin = unit.find(word) + word.size();
  std::string out = "tessera::sm90::Config{";
  out += unit.substr(begin, unit.find('}', begin) - begin);
  out += "}";
  return out;
}

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  std::set<std::string> tiles;
  for (const emulated::EmulatedCase& c : emulated::emulated_cases()) {
    const cases::CaseData data = cases::build(c.spec);
    const Problem problem = check_forward(data.inputs(), data.outputs(), data.options(), {});
    const sm90::ForwardPlan plan = sm90::plan_forward(problem, cuda::target_named("sm_90a"));
    if (!plan.reason.empty()) {
      std::cerr << cases::describe(c.spec) << ": " << plan.reason << "\n";
      return 1;
    }
    tiles.insert(spelled(plan.config));
  }
  std::ofstream out(argv[1]);
  out << "// Tiles that sm90/tiles.cpp gives to the cases of tests/emulated/cases.hpp. Written by tiles_main.cpp.\n"
         "#define HOPPER_TILES";
  const char* separator = " \\\n  ";
  for (const std::string& tile : tiles) {
    out << separator << "(" << tile << ")";
    separator = ", \\\n  ";
  }
  out << "\n";
  return out.good() ? 0 : 1;
}
