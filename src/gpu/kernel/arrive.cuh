// SPDX-License-Identifier: Apache-2.0
// Blocks that count each other: thin, one function, one instruction of the PTX ISA, whose section the comment names.
// Device code.
#pragma once

#include "math/types.hpp"

namespace tessera::gpu {

// "atom.acq_rel": how many have come before. What they wrote before they came is visible behind it, and what this
// thread has seen or written before is visible to those that come later. By one thread between two barriers it speaks
// for its block.
__device__ inline UInt32 arrive(UInt32* count) {
  UInt32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
  return before;
}

}  // namespace tessera::gpu
