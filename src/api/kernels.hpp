// The list of kernels, best first; kernels.cpp is the only file that names the backends.
// Included by src/api and the tests.
// Implements docs/architecture.md: one seam for all backends.
#pragma once

#include <span>

#include "core/kernel.hpp"
#include "gpu/step.hpp"

namespace tessera::api {

std::span<const Kernel* const> kernels();

// Those of them that run on GPUs, as planners, which need none.
std::span<const gpu::Algorithm> gpu_algorithms();

}  // namespace tessera::api
