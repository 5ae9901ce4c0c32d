// What both passes of `naive` share: lanes of a warp walk the same rows at the same time, so that one of the cache's
// answers serves all of them. Device text.
#pragma once

#include "gpu/kernel/common.cuh"
#include "simt/config.hpp"

namespace tessera::simt {

// The rows of the threads of this warp, one of which is `row`; there are `rows` in all.
__device__ inline Range rows_of_warp(Int64 row, Int64 rows) {
  const Int64 first = row - threadIdx.x % 32;
  return {first, lesser(first + 32, rows)};
}

}  // namespace tessera::simt
