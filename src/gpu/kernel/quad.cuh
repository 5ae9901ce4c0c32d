// SPDX-License-Identifier: Apache-2.0
// What the four neighbouring lanes that share a row of an accumulator do together. Device code.
#pragma once

#include "math/types.hpp"

namespace tessera::gpu {

// Over the four lanes of a quad: lane q brings x[c] of columns c, and gets x[i] of lane i, all of column q.
__device__ inline void transpose_in_quad(UInt32 (&x)[4]) {
  const bool upper = threadIdx.x & 2, odd = threadIdx.x & 1;
  const UInt32 a = __shfl_xor_sync(0xffffffffu, upper ? x[0] : x[2], 2);
  const UInt32 b = __shfl_xor_sync(0xffffffffu, upper ? x[1] : x[3], 2);
  // Of the two columns that this lane and its neighbour will have: from the lanes 0 and 1, then from 2 and 3.
  const UInt32 first[2] = {upper ? a : x[0], upper ? b : x[1]}, second[2] = {upper ? x[2] : a, upper ? x[3] : b};
  const UInt32 c = __shfl_xor_sync(0xffffffffu, odd ? first[0] : first[1], 1);
  const UInt32 d = __shfl_xor_sync(0xffffffffu, odd ? second[0] : second[1], 1);
  x[0] = odd ? c : first[0], x[1] = odd ? first[1] : c;
  x[2] = odd ? d : second[0], x[3] = odd ? second[1] : d;
}

// Eight 16-bit numbers to memory, or the first `count` if there are fewer. The caller's outputs lie where they lie.
template <class Number>
__device__ inline void store_columns(Number* to, const UInt32 (&x)[4], int count) {
  if (count >= 8 && reinterpret_cast<UInt64>(to) % 16 == 0) {
    *reinterpret_cast<uint4*>(to) = uint4{x[0], x[1], x[2], x[3]};
  } else {
#pragma unroll
    for (int n = 0; n < 8; ++n)
      if (n < count) to[n] = {UInt16(x[n / 2] >> n % 2 * 16)};
  }
}

}  // namespace tessera::gpu
