// SPDX-License-Identifier: Apache-2.0
// The tables of cases: rows that people can read, used by tests, `tessera check` and `tessera bench` alike.
// Included by cases/, cli/bench.cpp and tests/.
// Implements the lists of docs/numerics.md.
#pragma once

#include <vector>

#include "cases/case.hpp"

namespace tessera::cases {

std::vector<Case> regular();      // ordinary shapes in every type
std::vector<Case> features();     // each option alone, then in combinations
std::vector<Case> corner();       // what broke other implementations
std::vector<Case> caches();       // keys and values with types of their own and scales; forward passes
std::vector<Case> performance();  // what `tessera bench` times; too large to be checked each time

// Each row once per type, with the type appended to its name.
std::vector<Case> in_types(const std::vector<Case>& rows, const std::vector<Type>& types);

}  // namespace tessera::cases
