// SPDX-License-Identifier: Apache-2.0
// Units of GPU plans as functions for the emulated machine: device code is specialised by constants, so the functions
// are written while a test is built and follow the planners. Included by the programs that write them
// (tests/ladder/units_main.cpp, tests/mma/units_main.cpp). See tests/emulated/machine.hpp.
#pragma once

#include <fstream>
#include <set>
#include <string>

namespace tessera::emulated {

// What stands between two marks of a unit's text.
inline std::string between(const std::string& text, const std::string& before, const std::string& after) {
  const std::size_t begin = text.find(before) + before.size();
  return text.substr(begin, text.find(after, begin) - begin);
}

// A header that defines `variable`, a map from a unit's text to its function.
inline bool write_unit_functions(const char* path, const char* variable, const std::set<std::string>& units) {
  std::set<std::string> files;
  for (const std::string& unit : units) files.insert(between(unit, "#include \"", "\""));
  std::ofstream out(path);
  out << "// Units as functions. Written by a program of tests/emulated/unit_functions.hpp.\n";
  for (const std::string& file : files) out << "#include \"" << file << "\"\n";
  out << "inline const std::map<std::string, void (*)(const void*)> " << variable << "{\n";
  for (const std::string& unit : units) {
    out << "{R\"(" << unit << ")\", [](const void* p) {\n  ";
    if (unit.find("constexpr ") != std::string::npos)
      out << "static constexpr " << between(unit, "constexpr ", ";\n") << ";\n  ";
    out << between(unit, " p) { ", "(p); }") << "(*static_cast<const " << between(unit, "__grid_constant__ ", " p)")
        << "*>(p));\n}},\n";
  }
  out << "};\n";
  return out.good();
}

}  // namespace tessera::emulated
