// SPDX-License-Identifier: Apache-2.0
// The kernels for Hopper's tensor cores (sm_90a), by name: `hopper` (forward), `hopper_one_pass` and `hopper_two_pass`
// (backward). Included by src/api/kernels.cpp and the tests. docs/gpu_kernels.md, "Hopper".
#pragma once

#include <vector>

#include "gpu/step.hpp"

namespace tessera::sm90 {

// Best first. `bias_gradient`: the two-pass form leaves dBias to another family's kernel.
std::vector<gpu::Algorithm> algorithms(gpu::AddSteps bias_gradient);

}  // namespace tessera::sm90
