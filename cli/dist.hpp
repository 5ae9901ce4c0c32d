// SPDX-License-Identifier: Apache-2.0
// What the files of `tessera dist` share. Included by cli/dist.cpp and cli/dist_faults.cpp.
// Implements docs/scale_out.md, "Failure".
#pragma once

#include "cli/report.hpp"

namespace tessera::cli {

// The failure table on four ranks as threads, with this limit of time. Returns the exit status.
int dist_faults(double timeout, Json& rows);

}  // namespace tessera::cli
