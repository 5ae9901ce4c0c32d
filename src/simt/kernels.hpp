// The ladder: kernels for any NVIDIA GPU, compiled on demand.
// Included by src/api only.
// Each is a rung that Execution::kernel can name.
#pragma once

#include <vector>

#include "core/kernel.hpp"

namespace tessera::simt {

std::vector<const Kernel*> kernels();  // best first

}  // namespace tessera::simt
