// SPDX-License-Identifier: Apache-2.0
// Launches of the reading kernel; see read.hpp.
#include "cuda/read.hpp"

#include <algorithm>

#include "core/failure.hpp"
#include "cuda/device.hpp"
#include "cuda/jit/cache.hpp"

namespace tessera::cuda {
namespace {

constexpr const char* symbol = "tessera_kernel";
constexpr UInt32 unlikely = 0x9e3779b9u;  // as the sum of a thread's words

}  // namespace

ReadParams read_params(ReadRange first, ReadRange second, UInt32* found) {
  for (const ReadRange& range : {first, second})
    if (reinterpret_cast<std::uintptr_t>(range.from) % read_chunk != 0 || range.bytes < 0 ||
        range.bytes % read_chunk != 0)
      throw Failure(TESSERA_INVALID_ARGUMENT, text("a range to be read begins at ", range.from, " and has ",
                                                   range.bytes, " bytes; both must be multiples of ", read_chunk));
  return {.from = {first.from, second.from},
          .chunks = {first.bytes / read_chunk, second.bytes / read_chunk},
          .wanted = unlikely,
          .found = found};
}

std::string read_unit_text() {
  return text("#include \"cuda/kernel/read.cuh\"\nextern \"C\" __global__ __launch_bounds__(", read_threads,
              ", 1) void ", symbol,
              "(const __grid_constant__ tessera::cuda::ReadParams p) { tessera::cuda::read(p); }\n");
}

void enqueue_read(int device, StreamHandle stream, ReadRange first, ReadRange second, UInt32* found) {
  ReadParams params = read_params(first, second, found);
  const std::int64_t wanted = ceil_div(params.chunks[0] + params.chunks[1], read_threads);
  if (wanted == 0) return;
  const std::int64_t blocks = std::min<std::int64_t>(wanted, properties(device).multiprocessors);
  const LoadedKernel* const kernel = find_kernel(read_unit_text(), symbol, device);
  const CurrentDevice current(device);
  void* arguments[] = {&params};
  kernel->launch({.grid = {static_cast<unsigned>(blocks)}, .block = {read_threads}, .stream = stream}, arguments);
}

}  // namespace tessera::cuda
