// SPDX-License-Identifier: Apache-2.0
// libtessera_reading.so: the kernel that only reads (src/cuda/read.hpp) for bench/caches.py, by ctypes. A library of
// its own: libtessera.so is for users. Method: docs/benchmarks.md.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>

#include "cuda/read.hpp"

// Enqueues on a CUstream; `found` is a word of device memory. Not 0: `reason` says why not.
extern "C" __attribute__((visibility("default"))) int tessera_read(int device, void* stream, const void* first,
                                                                   std::int64_t first_bytes, const void* second,
                                                                   std::int64_t second_bytes, void* found, char* reason,
                                                                   std::size_t reason_bytes) {
  using namespace tessera::cuda;
  try {
    enqueue_read(device, static_cast<StreamHandle>(stream), {first, first_bytes}, {second, second_bytes},
                 static_cast<tessera::UInt32*>(found));
    return 0;
  } catch (const std::exception& error) {
    std::snprintf(reason, reason_bytes, "%s", error.what());
    return 1;
  }
}
