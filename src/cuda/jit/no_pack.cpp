// SPDX-License-Identifier: Apache-2.0
// An empty pack, for a library that was built without one and for the program that makes it; see pack.hpp.
#include "cuda/jit/pack.hpp"

namespace tessera::cuda {

std::string_view embedded_pack() { return {}; }

}  // namespace tessera::cuda
