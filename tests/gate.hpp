// The compile gate: compiles units without a GPU and judges what ptxas says of them. Included by gate_main.cpp (the
// gate itself) and gate_test.cpp (that it notices). See docs/architecture.md, "Compiling kernels".
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cuda/jit/pack.hpp"

namespace tessera::gate {

struct GateUnit {
  cuda::NamedUnit named;  // its variant is the first problem that needs it
  bool may_spill = false;
};

// Why a unit must not pass; empty: it may.
std::string fault_of(const GateUnit& unit, const cuda::Compiled& compiled);

struct Judged {
  const GateUnit* unit;
  cuda::Compiled compiled;
  std::string fault;
};

// Compiles and judges one; a unit that does not compile is at fault, too.
Judged judge(const GateUnit& unit);

// Compiles all of them, prints a row for each, then the slowest, the totals and the faults. The number of faults.
std::size_t run_gate(const std::vector<GateUnit>& units, int threads);

// --- what there is to compile (gate_problems.cpp)

// The distinct units of the problems of a set, as the planners give them.
struct UnitSet {
  std::string covers;  // for people
  std::size_t problems = 0;
  std::vector<std::string> refused;  // problems that no kernel takes, and what the best one says
  std::vector<GateUnit> units;
};
UnitSet quick_units();
UnitSet all_units();

}  // namespace tessera::gate
