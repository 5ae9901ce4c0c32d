// SPDX-License-Identifier: Apache-2.0
// What the files of `tessera dist` share. Included by cli/dist.cpp and cli/dist_*.cpp.
// Implements docs/scale_out.md, "Failure" and "Simulator".
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/report.hpp"
#include "tessera/types.hpp"

namespace tessera::cli {

// The failure table on four ranks as threads, with this limit of time. Returns the exit status.
int dist_faults(double timeout, Json& rows);

// Times of a rank's calls of so many queries and keys, printed and, if `out` is given, written for `simulate --times`.
struct DistMeasure {
  Device device;
  std::vector<std::int64_t> rows;     // empty: as many as suit the device
  std::int64_t heads, kv_heads, dim;  // of one rank
  std::string out;
};
int dist_measure(const DistMeasure& what, Json& rows);

}  // namespace tessera::cli
