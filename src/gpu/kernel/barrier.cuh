// SPDX-License-Identifier: Apache-2.0
// Barriers by their number and with a count of threads: what warps use that meet at different places of the code, as
// __syncthreads() must not. Thin: one function, one instruction of the PTX ISA, whose section each comment names.
// Device code.
#pragma once

namespace tessera::gpu {

// "bar.sync" on one of the 16 barriers of a block, by `threads` threads. 0 is that of __syncthreads(), too.
__device__ inline void sync_threads(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
// "bar.red.or": whether x is true in one of them.
__device__ inline bool sync_threads_or(int name, int threads, bool x) {
  int any;
  asm volatile("{ .reg .pred p, q; setp.ne.s32 p, %3, 0; bar.red.or.pred q, %1, %2, p; selp.s32 %0, 1, 0, q; }"
               : "=r"(any)
               : "r"(name), "r"(threads), "r"(int(x))
               : "memory");
  return any;
}

}  // namespace tessera::gpu
