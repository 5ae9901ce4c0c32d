// SPDX-License-Identifier: Apache-2.0
// Reading memory of a GPU and nothing else: what benchmarks of decoding are compared with. Not part of libtessera.so.
// Included by cli/bench_gpu_decode.cpp, bench/reading.cpp and tests. docs/benchmarks.md, "Method".
#pragma once

#include <cstdint>
#include <string>

#include "cuda/driver.hpp"
#include "cuda/read_params.hpp"

namespace tessera::cuda {

// Enqueues, and returns; may be captured. Throws Failure where an address or a count is no multiple of 16 bytes.
// `found` is a word of device memory.
struct ReadRange {
  const void* from = nullptr;
  std::int64_t bytes = 0;
};
void enqueue_read(int device, StreamHandle stream, ReadRange first, ReadRange second, UInt32* found);

// --- its parts

ReadParams read_params(ReadRange first, ReadRange second, UInt32* found);
std::string read_unit_text();

}  // namespace tessera::cuda
