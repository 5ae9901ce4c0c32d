// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory (mbarrier), and the registers that roles hand to each other. Thin: one function, one
// instruction of the PTX ISA, whose section each comment names. Device code.
#pragma once

#include "gpu/kernel/barrier.cuh"
#include "gpu/kernel/launch.cuh"
#include "math/types.hpp"

namespace tessera::sm90 {

__device__ inline UInt32 shared_address(const void* p) { return UInt32(__cvta_generic_to_shared(p)); }

// "mbarrier": a phase ends when `count` arrivals and all announced bytes are in.
struct Barrier {
  UInt64 state;

  __device__ UInt32 address() const { return shared_address(this); }
  __device__ void init(int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(count) : "memory");
  }
  __device__ void arrive() { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory"); }
  // The one arrival of a load, which announces the bytes to come.
  __device__ void expect(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
  }
  // Until the phase of this parity has ended. A barrier that is new counts as having ended the phase of parity 1.
  __device__ void wait(UInt32 parity) const {
    for (UInt32 tries = 0; !has_ended(parity); ++tries) {
#ifdef TESSERA_BOUNDED_WAITS
      if (tries == TESSERA_BOUNDED_WAITS) give_up(parity, tries);
#endif
    }
  }

 private:
  __device__ bool has_ended(UInt32 parity) const {
    UInt32 done;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(address()), "r"(parity)
                 : "memory");
    return done;
  }
  // Says who waits for what, and ends the kernel with an error, where it would hang. What a barrier's address stands
  // for: sm90/kernel/shared.cuh.
  __device__ void give_up(UInt32 parity, UInt32 tries) const {
    printf(
        "tessera: block %u, warp %u, lane %u waits for phase %u of the barrier at %u of shared memory, tried %u "
        "times\n",
        blockIdx.x, threadIdx.x / 32, threadIdx.x % 32, parity, address(), tries);
    __trap();
  }
};

// "fence.mbarrier_init": the asynchronous copies see barriers as initialised.
__device__ inline void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Says to tests that look for races whether what is read from here on is used: what is not may be anything. No
// instruction.
__device__ inline void judge_races(bool) {}

using gpu::start_kernel_after, gpu::sync_threads, gpu::wait_for_kernel_before;

// "setmaxnreg".
template <int registers>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

}  // namespace tessera::sm90
