// SPDX-License-Identifier: Apache-2.0
// The kernels for Hopper's tensor cores (sm_90a), by name: `hopper` and `hopper_mixed` (forward), `hopper_one_pass` and
// `hopper_two_pass` (backward). Included by src/api/kernels.cpp and the tests. docs/gpu_kernels.md, "Hopper".
#pragma once

#include <vector>

#include "gpu/step.hpp"

namespace tessera::sm90 {

// Best first. What is left to another family's kernels: dBias, by the two-pass form, and sequences of at most
// gpu::few_rows rows in a batch of paged ones.
std::vector<gpu::Algorithm> algorithms(gpu::AddSteps bias_gradient, gpu::AddSteps few_rows);

}  // namespace tessera::sm90
