// SPDX-License-Identifier: Apache-2.0
// Stands in for src/sm90/ptx/memory.cuh on the host; see tests/emulated/machine.hpp.
#pragma once

#include "tests/emulated/machine.hpp"

namespace tessera::sm90 {

inline void wait_for_count(const UInt32* count, UInt32 value) {
  emulated::Machine::here().wait_for_count(count, value);
}
inline void count_one_more(UInt32* count) { emulated::Machine::here().count_one_more(count); }

}  // namespace tessera::sm90
