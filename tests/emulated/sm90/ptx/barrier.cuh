// SPDX-License-Identifier: Apache-2.0
// Stands in for src/sm90/ptx/barrier.cuh on the host; see tests/emulated/machine.hpp. A new barrier counts as having
// ended the phase of parity 1.
#pragma once

#include "gpu/kernel/barrier.cuh"
#include "gpu/kernel/launch.cuh"
#include "tests/emulated/machine.hpp"

namespace tessera::sm90 {

using emulated::Machine;

inline UInt32 shared_address(const void* p) {
  return UInt32(static_cast<const unsigned char*>(p) - Machine::here().memory);
}

struct Barrier {
  UInt64 state;

  UInt32 address() const { return shared_address(this); }
  void init(int count) { model() = {.count = count}; }
  void arrive() { Machine::here().arrive(model()); }
  void expect(int bytes) { model().bytes += bytes, arrive(); }
  void complete(int bytes) const { model().bytes -= bytes, Machine::here().settle(model()); }
  void wait(UInt32 parity) const {
    Machine::here().wait(model(), [&] { return model().phase % 2 != parity; });
  }
  emulated::PhaseBarrier& model() const { return Machine::here().phase_barrier(this); }
};

inline void publish_barriers() {}
inline void judge_races(bool judged) { Machine::here().judge_races(judged); }
using gpu::start_kernel_after, gpu::sync_threads, gpu::wait_for_kernel_before;
template <int registers>
void give_registers() {}
template <int registers>
void take_registers() {}

}  // namespace tessera::sm90
