// SPDX-License-Identifier: Apache-2.0
// Sets the count of tiles taken to 0, before the kernel whose blocks take them; that one starts meanwhile. Device code.
#pragma once

#include "sm90/params.hpp"
#include "sm90/ptx/barrier.cuh"

namespace tessera::sm90 {

__device__ inline void restart(const RestartParams& p) {
  start_kernel_after();
  *p.taken = 0;
}

}  // namespace tessera::sm90
