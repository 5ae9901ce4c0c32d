// SPDX-License-Identifier: Apache-2.0
// Stands in for src/gpu/kernel/barrier.cuh on the host; see tests/emulated/machine.hpp. Threads meet whose numbers
// leave different remainders by their count.
#pragma once

#include <algorithm>

#include "tests/emulated/machine.hpp"

namespace tessera::gpu {

inline bool sync_threads_or(int name, int threads, bool x) {
  using emulated::Machine;
  const std::vector<UInt64>& all =
      Machine::here().meet(name, threads, threadIdx.x % threads, x, Machine::Order::memory);
  return std::ranges::find(all, UInt64(true)) != all.end();
}
inline void sync_threads(int name, int threads) { sync_threads_or(name, threads, false); }

}  // namespace tessera::gpu
