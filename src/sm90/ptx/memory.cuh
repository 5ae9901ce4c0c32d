// SPDX-License-Identifier: Apache-2.0
// Counts in global memory by which blocks wait for each other. Thin: one function, one instruction of the PTX ISA,
// whose section each comment names. Device code.
#pragma once

#include "math/types.hpp"

namespace tessera::sm90 {

// "ld.acquire": until the count is `value`. What others wrote before they counted is then visible.
__device__ inline void wait_for_count(const UInt32* count, UInt32 value) {
  for (UInt32 tries = 0;; ++tries) {
    UInt32 now;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(count) : "memory");
    if (now == value) return;
#ifdef TESSERA_BOUNDED_WAITS
    if (tries == TESSERA_BOUNDED_WAITS) {
      printf("tessera: block %u waits for count %u and sees %u, tried %u times\n", blockIdx.x, value, now, tries);
      __trap();
    }
#endif
  }
}

// "fence", "red": counts one more, after everything that this thread has seen written.
__device__ inline void count_one_more(UInt32* count) {
  asm volatile("fence.acq_rel.gpu; red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory");
}

}  // namespace tessera::sm90
