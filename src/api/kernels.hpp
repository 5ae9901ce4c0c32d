// SPDX-License-Identifier: Apache-2.0
// The list of kernels, best first; kernels.cpp is the only file that names the backends. Included by src/api and the
// tests. Implements docs/architecture.md: one interface for all backends.
#pragma once

#include <span>

#include "core/kernel.hpp"
#include "gpu/step.hpp"

namespace tessera::api {

std::span<const Kernel* const> kernels();

// The GPU kernels as planners: planning needs no GPU.
std::span<const gpu::Algorithm> gpu_algorithms();

}  // namespace tessera::api
