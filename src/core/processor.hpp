// SPDX-License-Identifier: Apache-2.0
// The processor's name. Included by src/api, for info(), and by cli/, for its reports.
// What the processor can do: src/cpu/isa.hpp.
#pragma once

#include <string>

namespace tessera {

std::string processor();  // as the system gives it, or "unknown"

}  // namespace tessera
