// Writes a header with the units that the ladder's planners give to the cases of ladder_cases.hpp, as functions for the
// emulated machine: device code is specialised by constants. Run while ladder_test is built, so that it follows the
// planners. See tests/emulated/machine.hpp.
#include <fstream>
#include <iostream>
#include <set>

#include "tests/ladder/ladder_cases.hpp"

using namespace tessera;

// What stands between two marks of a unit's text.
static std::string between(const std::string& text, const std::string& before, const std::string& after) {
  const std::size_t begin = text.find(before) + before.size();
  return text.substr(begin, text.find(after, begin) - begin);
}

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  std::set<std::string> units, files;
  for (const cases::Case& spec : ladder::ladder_cases()) {
    cases::CaseData data = cases::build(spec);
    for (const Pass pass : {Pass::forward, Pass::backward})
      for (const gpu::Algorithm& rung : ladder::emulated_rungs())
        for (const gpu::Step& step :
             rung.plan(ladder::problem_of(ladder::call_of(data, pass), pass), ladder::emulated_target()).list)
          units.insert(step.unit), files.insert(between(step.unit, "#include \"", "\""));
  }
  std::ofstream out(argv[1]);
  out << "// Units of the ladder for the cases of tests/ladder/ladder_cases.hpp. Written by units_main.cpp.\n";
  for (const std::string& file : files) out << "#include \"" << file << "\"\n";
  out << "inline const std::map<std::string, void (*)(const void*)> ladder_units{\n";
  for (const std::string& unit : units)
    out << "{R\"(" << unit << ")\", [](const void* p) {\n  static constexpr " << between(unit, "constexpr ", ";\n")
        << ";\n  " << between(unit, " p) { ", "(p); }") << "(*static_cast<const "
        << between(unit, "__grid_constant__ ", " p)") << "*>(p));\n}},\n";
  out << "};\n";
  return out.good() ? 0 : 1;
}
