// `mma`: 16-bit attention by mma.sync, for every NVIDIA GPU from sm_75 on that has no kernels of its own.
// Included by src/api/kernels.cpp and the tests. docs/gpu_kernels.md, "mma".
#pragma once

#include <vector>

#include "gpu/step.hpp"
#include "mma/config.hpp"

namespace tessera::mma {

std::vector<gpu::Algorithm> algorithms();

std::string forward_unit_text(const Config& config);

}  // namespace tessera::mma
