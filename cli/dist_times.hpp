// SPDX-License-Identifier: Apache-2.0
// A file of measured call times, for `tessera dist simulate --times`. Included by cli/dist.cpp. Implements
// docs/scale_out.md, "Simulator".
#pragma once

#include <string>

#include "dist/simulate.hpp"

namespace tessera::cli {

// Sets both passes' times. Throws Failure with the file's name and what is wrong with which line.
void read_call_times(const std::string& path, dist::Machine& machine);

}  // namespace tessera::cli
