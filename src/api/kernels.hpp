// The list of kernels, best first; kernels.cpp is the only file that names the backends.
// Included by src/api.
// Implements docs/architecture.md: one seam for all backends.
#pragma once

#include <span>

#include "core/kernel.hpp"

namespace tessera::api {

std::span<const Kernel* const> kernels();

}  // namespace tessera::api
