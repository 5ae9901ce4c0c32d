// Kernels for Hopper's tensor cores (sm_90a).
// Included by src/api only.
// Their plans: sm90/plan.hpp.
#pragma once

#include <vector>

#include "core/kernel.hpp"

namespace tessera::sm90 {

std::vector<const Kernel*> kernels();

}  // namespace tessera::sm90
