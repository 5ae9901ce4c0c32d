// SPDX-License-Identifier: Apache-2.0
// Calls that are one launch of one kernel, whatever they are given: append and merge. The kernel is compiled and loaded
// when a device first needs it, and remembered here: later calls neither make its text nor look for it.
// Included by gpu/append.cpp and gpu/merge.cpp.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "cuda/device.hpp"
#include "cuda/jit/cache.hpp"
#include "gpu/unit.hpp"

namespace tessera::gpu {

// A static one is constinit.
class LaunchSite {
 public:
  // Asynchronous. `params` is the kernel's one parameter. Without blocks nothing is launched.
  template <class Params>
  void launch(std::string (*unit_text)(), int device, void* stream, std::int64_t blocks, int threads,
              const Params& params) {
    static_assert(sizeof(Params) <= 4096, "what every GPU takes");
    (void)cuda::properties(device);  // says why, if there is no such device
    if (blocks == 0) return;
    const cuda::LoadedKernel* const kernel = find(unit_text, device);
    const cuda::CurrentDevice current(device);
    void* arguments[] = {const_cast<Params*>(&params)};
    kernel->launch({.grid = {static_cast<unsigned>(blocks)},
                    .block = {static_cast<unsigned>(threads)},
                    .stream = static_cast<cuda::StreamHandle>(stream)},
                   arguments);
  }

 private:
  static constexpr std::size_t remembered = 16;  // devices; beyond them the kernel is looked for each time

  const cuda::LoadedKernel* find(std::string (*unit_text)(), int device) {
    const auto n = static_cast<std::size_t>(device);
    if (n < remembered)
      if (const cuda::LoadedKernel* known = kernels[n].load(std::memory_order_acquire)) return known;
    const cuda::LoadedKernel* const found = cuda::find_kernel(unit_text(), kernel_symbol, device);
    if (n < remembered) kernels[n].store(found, std::memory_order_release);
    return found;
  }

  std::array<std::atomic<const cuda::LoadedKernel*>, remembered> kernels{};
};

}  // namespace tessera::gpu
