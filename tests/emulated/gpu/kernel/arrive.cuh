// SPDX-License-Identifier: Apache-2.0
// Stands in for src/gpu/kernel/arrive.cuh on the host: an operation that releases and acquires orders no more than one
// between two fences.acq_rel.
#pragma once

#include "math/types.hpp"
#include "tests/emulated/cuda.hpp"

namespace tessera::gpu {

inline UInt32 arrive(UInt32* count) {
  auto& machine = emulated::Machine::here();
  machine.fence(false);
  const UInt32 before = atomicAdd(count, 1u);
  machine.fence(false);
  return before;
}

}  // namespace tessera::gpu
