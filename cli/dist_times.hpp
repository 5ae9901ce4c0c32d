// SPDX-License-Identifier: Apache-2.0
// A file of measured call times instead of rates, for `tessera dist simulate --times`. Included by cli/dist.cpp.
// Implements docs/scale_out.md, "Simulator".
#pragma once

#include <string>

#include "dist/simulate.hpp"

namespace CLI {
class App;
}

namespace tessera::cli {

// Rates beside a file of times would have no effect. Throws Failure with the flag.
void require_no_rates(const CLI::App& command);

// Sets both passes' times. Throws Failure with the file's name and what is wrong with which line.
void read_call_times(const std::string& path, dist::Machine& machine);

}  // namespace tessera::cli
