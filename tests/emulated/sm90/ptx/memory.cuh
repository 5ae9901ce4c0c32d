// SPDX-License-Identifier: Apache-2.0
// Stands in for src/sm90/ptx/memory.cuh on the host. Blocks run one after another there, so a count that a block waits
// for is either there or never comes.
#pragma once

#include "tests/emulated/machine.hpp"

namespace tessera::sm90 {

inline void wait_for_count(const UInt32* count, UInt32 value) {
  emulated::Machine::here().wait_until([&] { return *count == value; });
}
inline void count_one_more(UInt32* count) { ++*count; }

}  // namespace tessera::sm90
