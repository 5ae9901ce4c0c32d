// SPDX-License-Identifier: Apache-2.0
// The float64 reference as a kernel behind the seam: the oracle that everything else is judged by, callable by name.
// Included by src/api and by the reference's own files.
#pragma once

#include "core/kernel.hpp"

namespace tessera::reference {

const Kernel& kernel();

void forward(const Problem& problem, const Call& call, int threads);
void backward(const Problem& problem, const Call& call, int threads);

}  // namespace tessera::reference
