// SPDX-License-Identifier: Apache-2.0
// An algorithm's plans as kernels of the library: compiled, loaded and launched on a GPU. Included by src/api only.
// Implements docs/gpu_kernels.md, "The GPU layer".
#pragma once

#include "core/kernel.hpp"
#include "gpu/step.hpp"

namespace tessera::gpu {

class GpuKernel : public Kernel {
 public:
  explicit GpuKernel(const Algorithm& algorithm) : algorithm(algorithm) {}
  const char* name() const override { return algorithm.name; }
  const char* family() const override { return algorithm.family; }
  DeviceType device() const override { return DeviceType::cuda; }
  PlanOrReason plan(const Problem& problem, const Execution& execution) const override;
  std::string refusal(const Problem& problem, const Execution& execution) const override;

 private:
  Steps steps_for(const Problem& problem, const Execution& execution) const;

  Algorithm algorithm;
};

}  // namespace tessera::gpu
