// SPDX-License-Identifier: Apache-2.0
// Stands in for src/mma/ptx/reduce.cuh on the host; see tests/emulated/machine.hpp.
#pragma once

#include "tests/emulated/machine.hpp"

namespace tessera::mma {

using emulated::Machine;

inline void add_sums(float* part, int lane, const float* x) {
  Machine::here().change(part + 4 * lane, 16, false, [&] {
    for (int n = 0; n < 4; ++n) part[4 * lane + n] += x[n];
  });
}
inline void store_sums(float* part, int lane, const float* x) {
  for (int n = 0; n < 4; ++n) part[4 * lane + n] = x[n];
}
inline void load_sums(const float* part, int lane, float* x) {
  for (int n = 0; n < 4; ++n) x[n] = part[4 * lane + n];
}

inline UInt32 look_at_count(const UInt32* count) { return Machine::here().look_at_count(count); }
inline void wait_for_count(const UInt32* count, UInt32 value) { Machine::here().wait_for_count(count, value); }
inline void fence_counts() { Machine::here().fence(false); }
inline void count_behind_fence(UInt32* count) { Machine::here().count_behind_fence(count); }

// Two warps: one arrives and goes on, the other arrives and waits, so a thread that waits sees the phase end.
inline emulated::PhaseBarrier& pair_barrier(int name) {
  static const char places[17] = {};
  emulated::PhaseBarrier& barrier = Machine::here().phase_barrier(&places[name]);
  barrier.count = 64;
  return barrier;
}
inline void arrive_at_pair(int name) { Machine::here().arrive(pair_barrier(name)); }
inline void wait_for_pair(int name) {
  emulated::PhaseBarrier& barrier = pair_barrier(name);
  const UInt32 phase = barrier.phase;
  arrive_at_pair(name);
  Machine::here().wait(barrier, [&] { return barrier.phase != phase; });
}

}  // namespace tessera::mma
