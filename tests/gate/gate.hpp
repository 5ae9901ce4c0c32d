// SPDX-License-Identifier: Apache-2.0
// The compile gate: compiles units without a GPU and judges what ptxas says of them. Included by main.cpp (the gate
// itself) and gate_test.cpp (that it notices). See docs/architecture.md, "Compiling kernels".
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

// Compiles a unit that never changes. Machines differ in speed, and so does one that is busy, so what other units take
// is told in multiples of this one's processor time.
double reference_seconds();

// Why a unit must not pass; empty: it may. `times` is its compile time in multiples of the reference.
std::string fault_of(const GateUnit& unit, const cuda::Compiled& compiled, double times);

struct Judged {
  const GateUnit* unit;
  cuda::Compiled compiled;
  double times;
  std::string fault;
};

// Compiles and judges one; a unit that does not compile is at fault, too.
Judged judge(const GateUnit& unit, double reference_seconds);

// Compiles all of them, prints a row for each, then the slowest, the totals and the faults. The number of faults.
std::size_t run_gate(const std::vector<GateUnit>& units, int threads);

// --- what there is to compile (problems.cpp)

// The distinct units of many problems, as the planners give them.
struct UnitSet {
  std::size_t problems = 0;
  std::vector<std::string> refused;  // problems that none of the kernels takes that they are for, and why
  std::size_t known = 0;             // units, of which these were chosen
  std::vector<GateUnit> units;
};
UnitSet known_units();

// --- which of it is compiled (cover.cpp)

// What a unit is compiled with: "GPU = sm_80", the members of its configuration ("D = 64", "softcap = true") and how
// many of its options are on.
std::vector<std::string> settings_of(const cuda::Unit& unit);

// Of every kernel so many units that what meets in a known one also meets in a chosen one. quick: each setting by
// itself (but tiles of rungs that calls get only by name), and any two options, on or off. full: any two settings, and
// any two options with any third setting; of `decode`, any three settings.
enum class Depth { quick, full };
UnitSet chosen_units(UnitSet known, Depth depth);

}  // namespace tessera::gate
