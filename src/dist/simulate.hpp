// SPDX-License-Identifier: Apache-2.0
// How long a schedule would take on a machine that is given in numbers: the same value that the executor runs, timed
// step by step. Included by the command line and its tests. Implements docs/scale_out.md, "Simulator".
#pragma once

#include "dist/sizes.hpp"

namespace tessera::dist {

struct Machine {
  double forward_flops = 700e12, backward_flops = 600e12;  // of one rank, inside a call
  double call_seconds = 15e-6;                             // of every call, besides
  double link = 50e9;                                      // bytes per second between nodes, each way and rank
  double node_link = 450e9;                                // the same inside a node
  double latency = 5e-6;                                   // of a step's messages
};

struct Simulated {
  double seconds = 0;    // until the last rank is done
  double compute = 0;    // of it, the mean rank's calls without their fixed costs
  double key_bytes = 0;  // memory for keys and values of the largest rank
  Int64 calls = 0;       // of the rank with most
  double efficiency() const { return seconds > 0 ? compute / seconds : 1; }
};

Simulated simulate(const Schedule& schedule, const Shape& shape, const Machine& machine);

}  // namespace tessera::dist
