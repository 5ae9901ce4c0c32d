// SPDX-License-Identifier: Apache-2.0
// `mma`: 16-bit attention by mma.sync, for every NVIDIA GPU from sm_75 on that has no kernels of its own.
// Included by src/api/kernels.cpp and the tests. docs/gpu_kernels.md, "mma".
#pragma once

#include <vector>

#include "gpu/step.hpp"
#include "mma/backward_config.hpp"
#include "mma/one_pass_config.hpp"

namespace tessera::mma {

// `mma` and `mma_mixed` (forward), `mma_one_pass` and `mma_two_pass` (backward). What is left to another family's
// kernels: dBias, and sequences of at most gpu::few_rows rows in a batch of paged ones.
std::vector<gpu::Algorithm> algorithms(gpu::AddSteps bias_gradient, gpu::AddSteps few_rows);

std::string forward_unit_text(const Config& config);
std::string backward_unit_text(const BackwardConfig& config);
std::string one_pass_unit_text(const OnePassConfig& config);

}  // namespace tessera::mma
