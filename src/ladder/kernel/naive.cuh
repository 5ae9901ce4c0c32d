// SPDX-License-Identifier: Apache-2.0
// What both passes of `naive` share: all lanes of a warp loop over the same rows in lockstep, so that a load has one
// address per warp and one cache access serves all lanes (a broadcast). Device code.
#pragma once

#include "gpu/kernel/common.cuh"
#include "ladder/config.hpp"

namespace tessera::ladder {

// The rows that the threads of this warp own. `row` is this thread's; the tensor has `rows`.
__device__ inline Range rows_of_warp(Int64 row, Int64 rows) {
  const Int64 first = row - threadIdx.x % 32;
  return {first, lesser(first + 32, rows)};
}

}  // namespace tessera::ladder
