// SPDX-License-Identifier: Apache-2.0
// A CUDA device's memory for attention over several ranks. Included by dist_api.cpp and the tests.
// Implements docs/scale_out.md, "Rows on a GPU".
#pragma once

#include <memory>

#include "dist/memory.hpp"

namespace tessera::api {

// Everything happens in the order of the caller's stream. Memory is kept for the next call until this is destroyed.
std::shared_ptr<dist::Memory> cuda_memory(Device device, void* stream);

}  // namespace tessera::api
