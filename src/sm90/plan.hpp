// Which Hopper kernel answers a problem, and on which grid. Needs no GPU: the compile gate and `tessera pack` ask it
// too. Included by src/sm90 and src/api.
#pragma once

#include <string>

#include "core/problem.hpp"
#include "cuda/device.hpp"
#include "sm90/config.hpp"

namespace tessera::sm90 {

struct ForwardPlan {
  Config config;
  int tiles_per_head = 0, section = 1, grid = 0;  // see ForwardParams
  std::int64_t tiles = 0;
  std::string reason;  // why there is no plan: names the option, its value and the rule
};

ForwardPlan plan_forward(const Problem& problem, const cuda::Target& target);

}  // namespace tessera::sm90
