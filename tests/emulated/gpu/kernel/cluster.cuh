// SPDX-License-Identifier: Apache-2.0
// Stands in for src/gpu/kernel/cluster.cuh on the host; see tests/emulated/machine.hpp.
#pragma once

#include "tests/emulated/machine.hpp"

namespace tessera::gpu {

inline void sync_cluster() { emulated::Machine::here().sync_cluster(); }
inline float load_from_block(UInt32 rank, UInt32 address) {
  float x;
  emulated::Machine::here().load_from_block(&x, rank, address, sizeof x);
  return x;
}
inline float4 load_four_from_block(UInt32 rank, UInt32 address) {
  float4 x;
  emulated::Machine::here().load_from_block(&x, rank, address, sizeof x);
  return x;
}

}  // namespace tessera::gpu
