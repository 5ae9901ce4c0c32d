// SPDX-License-Identifier: Apache-2.0
// What tests tell the main of their program (tests/support/main.cpp), which fails a program that has shown nothing.
// Included by tests/ only.
#pragma once

#include <cstddef>
#include <string>

namespace tessera::test {

constexpr int skipped_status = 77;  // of a program that has nothing to test here; ctest says "Skipped"

// The cases of the running test: those that were judged, and those that no kernel took.
struct CaseCount {
  std::size_t judged = 0, refused = 0;
};
inline CaseCount case_count;

// Why this machine has nothing for a program to test, or nothing; asked before its first test. Null: it always has.
inline std::string (*reason_to_skip)() = nullptr;

}  // namespace tessera::test
