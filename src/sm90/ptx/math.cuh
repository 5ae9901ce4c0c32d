// SPDX-License-Identifier: Apache-2.0
// Conversions and exponentials of the GPU layer, under this family's names. Device code.
#pragma once

#include "gpu/kernel/math.cuh"
#include "sm90/config.hpp"

namespace tessera::sm90 {

using gpu::exp2_of;
using gpu::packed;
using gpu::unpacked;

}  // namespace tessera::sm90
