// SPDX-License-Identifier: Apache-2.0
// The backward pass that makes all gradients in one pass over the scores: three launches, and what they keep in the
// workspace. Needs no GPU: the compile gate and `tessera pack` ask it too. Included by src/sm90.
#pragma once

#include <string>

#include "core/problem.hpp"
#include "cuda/device.hpp"
#include "sm90/one_pass_config.hpp"
#include "sm90/params.hpp"

namespace tessera::sm90 {

struct OnePassPlan {
  OnePassConfig config;
  Element o, dQ;
  int prepare_lanes = 0;              // that share a row
  std::int64_t blocks = 0, grid = 0;  // of keys; of threads
  std::int64_t query_blocks = 0;      // of what comes before and after
  std::int64_t tiles_per_head = 0;
  WorkOrder order{};
  // In the family's own part of the workspace: the sums of dQ, the counts, numbers of queries, the works.
  struct Part {
    std::int64_t at = 0, bytes = 0;
  };
  Part sums, counts, numbers, works;
  std::int64_t own_bytes = 0;
  std::string reason;  // why there is no plan: names the option, its value and the rule

  // What the first launch sets to 0: the counts, and the sums where they are only added to.
  Part zeros() const;
};

OnePassPlan plan_one_pass(const Problem& problem, const cuda::Target& target);

OnePassMemory memory_of(const OnePassPlan& plan, void* own);

}  // namespace tessera::sm90
