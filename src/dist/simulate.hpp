// SPDX-License-Identifier: Apache-2.0
// How long a schedule would take on a machine that is given in numbers: the same value that the executor runs, timed
// step by step. Included by the command line and its tests. Implements docs/scale_out.md, "Simulator".
#pragma once

#include <vector>

#include "dist/sizes.hpp"

namespace tessera::dist {

// Measured times of a pass's calls, by the operations that they have.
struct CallTimes {
  struct Point {
    double flops = 0, seconds = 0;
  };
  std::vector<Point> points;  // ascending in both

  bool empty() const { return points.empty(); }
  // Between two points on the line through them; a smaller call takes as long as the smallest, a larger one has the
  // rate of the largest.
  double seconds(double flops) const;
  double best_rate() const;  // operations per second
};

struct Machine {
  double forward_flops = 700e12, backward_flops = 600e12;  // of one rank, inside a call
  double call_seconds = 15e-6;                             // of every call, besides
  double link = 50e9;                                      // bytes per second between nodes, each way and rank
  double node_link = 450e9;                                // the same inside a node
  double latency = 5e-6;                                   // of a step's messages
  CallTimes forward_times{}, backward_times{};             // where given: instead of rates and call_seconds
};

struct Simulated {
  double seconds = 0;    // until the last rank is done
  double compute = 0;    // of it, the mean rank's calls without their fixed costs, or all at the best rate measured
  double key_bytes = 0;  // memory for keys and values of the largest rank
  Int64 calls = 0;       // of the rank with most
  double efficiency() const { return seconds > 0 ? compute / seconds : 1; }
};

Simulated simulate(const Schedule& schedule, const Shape& shape, const Machine& machine);

}  // namespace tessera::dist
