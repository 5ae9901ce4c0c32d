// SPDX-License-Identifier: Apache-2.0
// What the reading kernel is given. Shared by host and device code; included by cuda/read.hpp and its kernel.
// docs/benchmarks.md, "Method", says what it is for.
#pragma once

#include "math/types.hpp"

namespace tessera::cuda {

inline constexpr int read_threads = 1024;  // one block of them on each multiprocessor
inline constexpr int read_at_once = 8;     // loads of a thread on their way: 128 KB of a multiprocessor
inline constexpr int read_chunk = 16;      // bytes of a load

// Two ranges of memory that begin at multiples of a chunk. The second may be empty.
struct ReadParams {
  const void* from[2];
  Int64 chunks[2];
  UInt32 wanted;  // a thread whose loads have this sum (xor of words) counts itself
  UInt32* found;
};

}  // namespace tessera::cuda
