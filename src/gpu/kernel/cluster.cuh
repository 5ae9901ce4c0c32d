// SPDX-License-Identifier: Apache-2.0
// Blocks of a cluster, which meet and read each other's shared memory: thin, one function, one instruction of the PTX
// ISA or two, whose section each comment names. From sm_90 on. Device code.
#pragma once

#include "math/types.hpp"

namespace tessera::gpu {

// "barrier.cluster": all threads of all blocks; what each wrote before is visible to all behind it.
__device__ inline void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// "mapa", "ld.shared::cluster": what lies at this address of shared memory in the cluster's block number `rank`.
__device__ inline UInt32 address_in_block(UInt32 rank, UInt32 address) {
  UInt32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ inline float load_from_block(UInt32 rank, UInt32 address) {
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address_in_block(rank, address)) : "memory");
  return x;
}
__device__ inline float4 load_four_from_block(UInt32 rank, UInt32 address) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address_in_block(rank, address))
               : "memory");
  return x;
}

}  // namespace tessera::gpu
