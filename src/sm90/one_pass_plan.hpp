// The backward pass that makes all gradients in one pass over the scores: three launches, and what they keep in the
// workspace. Needs no GPU: the compile gate and `tessera pack` ask it too. Included by src/sm90 and src/api.
#pragma once

#include <string>

#include "core/problem.hpp"
#include "cuda/device.hpp"
#include "simt/ladder.hpp"
#include "sm90/one_pass_config.hpp"

namespace tessera::sm90 {

struct OnePassPlan {
  OnePassConfig config;
  Element o, dQ;
  int prepare_lanes = 0;  // that share a row
  std::int64_t prepare_blocks = 0, blocks = 0, finish_blocks = 0, tiles_per_head = 0;
  // Bytes in the workspace: where the sums of dQ begin, how many there are, where the counts begin; all.
  std::int64_t sums_at = 0, sums_bytes = 0, counts_at = 0, counts_bytes = 0, workspace_bytes = 0;
  simt::Steps start, end;  // the ladder's: rows that no sequence uses, dSink
  std::string reason;      // why there is no plan: names the option, its value and the rule
};

OnePassPlan plan_one_pass(const Problem& problem, const cuda::Target& target);

// What the first launch sets to 0: the counts, and the sums where they are only added to.
struct Zeros {
  std::int64_t at, bytes;
};
Zeros zeros_of(const OnePassPlan& plan);

}  // namespace tessera::sm90
