// SPDX-License-Identifier: Apache-2.0
// Which Hopper kernel answers a problem, and on which grid. Needs no GPU: the compile gate and `tessera pack` ask it
// too. Included by src/sm90.
#pragma once

#include <string>
#include <vector>

#include "core/problem.hpp"
#include "cuda/device.hpp"
#include "sm90/backward_config.hpp"

namespace tessera::sm90 {

struct ForwardPlan {
  Config config;
  int tiles_per_head = 0, section = 1, grid = 0;  // see ForwardParams
  std::int64_t tiles = 0;
  bool varied = false;  // tiles differ in their work: blocks take them as they come to them
  std::string reason;   // why there is no plan: names the option, its value and the rule
};

// Why these kernels can take the problem in neither pass, by option, value and rule; empty: they may.
std::string refusal(const Problem& problem, const cuda::Target& target);

// What of a cache's keys the forward kernel does not take; empty: nothing.
std::string refused_keys(const Problem& problem);

// The boxes that pieces of tiles are copied in: of 1 << first to 1 << last rows (sm90/config.hpp).
struct Boxes {
  int first, last;
};
Boxes boxes_of(const Config& config, const Pages& pages);

// Tiles over all heads and sequences are numbered in 32 bits, with room for those who ask for one more than there are.
inline constexpr std::int64_t most_tiles = std::int64_t{1} << 30;
std::string tiles_refusal(const Problem& problem, std::int64_t tiles);  // empty: they are few enough

// The scale of scores, corrected for what the tensor cores lose.
double score_scale(const Problem& problem);

// Whether O, which lies where the caller put it, may leave by tensor copies; otherwise its rows are stored one by one.
// Asked at each call: no plan depends on where outputs lie.
bool copyable(const Tensor& o);

ForwardPlan plan_forward(const Problem& problem, const cuda::Target& target);

// The backward pass in two passes over the scores: a kernel for each side whose gradients are asked for.
struct BackwardPlan {
  struct Pass {
    BackwardConfig config;
    std::int64_t blocks;
  };
  std::vector<Pass> passes;
  std::string reason;
};

BackwardPlan plan_backward(const Problem& problem, const cuda::Target& target);

}  // namespace tessera::sm90
