// SPDX-License-Identifier: Apache-2.0
// The only file that names the backends; see kernels.hpp.
#include "api/kernels.hpp"

#include <vector>

#include "core/once.hpp"
#include "cpu/kernels.hpp"
#include "decode/algorithms.hpp"
#include "gpu/backend.hpp"
#include "ladder/ladder.hpp"
#include "mma/algorithms.hpp"
#include "reference/kernel.hpp"
#include "sm90/algorithms.hpp"
#include "vulkan/backend.hpp"

namespace tessera::api {

std::span<const gpu::Algorithm> gpu_algorithms() {
  static constinit Once<const std::vector<gpu::Algorithm>> list;
  return list.get([] {
    std::vector<gpu::Algorithm> all = decode::algorithms();  // first: few rows over pages are its own
    const auto append = [&](std::vector<gpu::Algorithm> family) {
      for (gpu::Algorithm& algorithm : family) all.push_back(std::move(algorithm));
    };
    append(sm90::algorithms(ladder::add_bias_gradient, decode::add_few_rows));
    append(mma::algorithms(ladder::add_bias_gradient, decode::add_few_rows));
    append(decode::fallbacks());
    append(ladder::algorithms());
    return all;
  });
}

std::span<const Kernel* const> kernels() {
  static constinit Once<const std::vector<gpu::GpuKernel>> gpu_kernels;
  static constinit Once<const std::vector<const Kernel*>> list;
  return list.get([] {
    std::vector<const Kernel*> all;
    for (const gpu::GpuKernel& kernel : gpu_kernels.get([] {
           const std::span<const gpu::Algorithm> algorithms = gpu_algorithms();
           return std::vector<gpu::GpuKernel>(algorithms.begin(), algorithms.end());
         }))
      all.push_back(&kernel);
    for (const Kernel* kernel : vulkan::kernels()) all.push_back(kernel);
    for (const Kernel* kernel : cpu::kernels()) all.push_back(kernel);
    all.push_back(&reference::kernel());
    return all;
  });
}

}  // namespace tessera::api
