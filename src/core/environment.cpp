// SPDX-License-Identifier: Apache-2.0
// See environment.hpp.
#include "core/environment.hpp"

#include <cstdlib>

namespace tessera {

const char* environment(const char* name) noexcept { return secure_getenv(name); }

}  // namespace tessera
