// SPDX-License-Identifier: Apache-2.0
// Stands in for src/gpu/kernel/arrive.cuh on the host.
#pragma once

#include "math/types.hpp"
#include "tests/emulated/cuda.hpp"

namespace tessera::gpu {

inline UInt32 arrive(UInt32* count) {
  __threadfence();
  const UInt32 before = atomicAdd(count, 1u);
  __threadfence();
  return before;
}

}  // namespace tessera::gpu
