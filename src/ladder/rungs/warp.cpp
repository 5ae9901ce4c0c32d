// SPDX-License-Identifier: Apache-2.0
// `warp`: each warp owns rows, with butterfly reductions by warp shuffles. Backward is FlashAttention-2's loop order,
// without its atomics. See ladder/ladder.hpp; the kernels are ladder/kernel/warp_*.cuh.
#include <algorithm>

#include "core/limits.hpp"
#include "ladder/ladder.hpp"

namespace tessera::ladder {
namespace {

constexpr Function forward{"warp_forward", "warp_forward", "ForwardParams"};
constexpr Function backward{"warp_backward", "warp_backward", "BackwardParams"};

// Shared memory that every GPU gives a block without opt-in, so that plans do not depend on the GPU.
constexpr int shared_limit = 48 << 10;
constexpr int warps = 8;

// Split factor of backward: blocks that share the keys of one sequence and head, each with its own copy of dQ to
// accumulate into. The limit is a constant: one that depended on the batch would make the bits of a sequence depend on
// its neighbours.
constexpr std::int64_t most_splits = 16;

Config forward_config(const Problem& p) {
  constexpr int warp_rows = 4;
  Config c = config_of(p, 32 * warps);
  c.block_rows = warps * warp_rows, c.block_cols = 32, c.wide_loads = false;  // it loads element by element
  while (warp_forward_shared_bytes(c) > shared_limit) c.threads /= 2, c.block_rows /= 2;
  return c;
}

// Register budget: a warp's keys, with k, v and two accumulators each for dK and dV, take about 100 registers of a
// thread.
Config backward_config(const Problem& p) {
  const std::int64_t width = p.D + p.Dv;
  const int warp_keys = width <= 256 ? 4 : width <= 512 ? 2 : 1;
  Config c = config_of(p, 32 * warps);
  c.block_rows = 32, c.block_cols = warps * warp_keys, c.wide_loads = false;
  // As many as registers allow: dims that do not fill the lanes take predicates, and the gate found bf16 with D = 40 to
  // spill.
  const bool fills_lanes = p.D % 32 == 0 && p.Dv % 32 == 0;
  c.blocks_per_sm = width <= (fills_lanes ? 160 : 64) ? 2 : 1;
  while (warp_backward_shared_bytes(c) > shared_limit) c.block_rows /= 2;
  return c;
}

}  // namespace

Steps warp_steps(const Problem& p, const cuda::Target&) {
  Steps steps(p);
  steps.reason = early_refusal(p);
  if (!steps.reason.empty()) return steps;

  if (p.pass == Pass::forward) {
    const Config c = forward_config(p);
    steps.add(step(forward, c, query_blocks(p, c.block_rows), warp_forward_shared_bytes(c)));
    return steps;
  }
  const Config c = backward_config(p);
  const std::int64_t splits = std::clamp<std::int64_t>(ceil_div(p.longest_k(), c.block_cols), 1, most_splits);
  if (p.dq) steps.accumulators.dq = static_cast<int>(splits);
  add_backward_start(steps, p);
  steps.add(step(backward, c, p.has_keys() ? product({p.B, p.Hk, splits}) : 0, warp_backward_shared_bytes(c)));
  add_conversion(steps, p);
  return steps;
}

}  // namespace tessera::ladder
