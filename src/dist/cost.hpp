// SPDX-License-Identifier: Apache-2.0
// What a schedule costs each rank, without running it: rows, steps, bytes that travel, memory. Included by the C ABI
// and the command line. Implements docs/scale_out.md, "Plans".
#pragma once

#include <string>
#include <vector>

#include "dist/sizes.hpp"

namespace tessera::dist {

struct RankCost {
  Int64 rows = 0;
  Int64 steps = 0;     // in which it works, sends or receives
  Int64 sent = 0;      // bytes
  Int64 received = 0;  // bytes
  Int64 memory = 0;    // bytes that the executor allocates, the messages that travel at one time included
  double pairs = 0;    // of a query and a key that it sees, times query heads
};

std::vector<RankCost> rank_costs(const Schedule& schedule, const Shape& shape);

// Mean over largest work; 1 where there is none.
double balance(const std::vector<RankCost>& costs);

// Lines for people: a table of both passes by rank, and the balance of each. Ranks alike are one line.
std::string table(const Schedule& forward, const Schedule& backward, const Shape& shape);

}  // namespace tessera::dist
