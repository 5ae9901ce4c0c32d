// SPDX-License-Identifier: Apache-2.0
// Stands in for src/gpu/kernel/launch.cuh on the host: launches run one after another, but who looks for races asks
// whether a programmatic one waits for what it reads.
#pragma once

#include "tests/emulated/machine.hpp"

namespace tessera::gpu {

inline void wait_for_kernel_before() { emulated::Machine::here().wait_for_launch_before(); }
inline void start_kernel_after() {}

}  // namespace tessera::gpu
