// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launches: a kernel may start while the one before it in its stream still runs. Thin: one
// function, one instruction of the PTX ISA, whose section each comment names. GPUs before sm_90 have none, and plans
// launch nothing that way there. Device code.
#pragma once

namespace tessera::gpu {

// "griddepcontrol": until the kernel before this one in its stream has ended and its writes are visible; and: the next
// kernel may start already.
__device__ inline void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ inline void start_kernel_after() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace tessera::gpu
