// `warp`: warps that own rows, with butterfly reductions; the FlashAttention-2 backward pass without atomics.
// See simt/ladder.hpp; the kernels are simt/kernel/warp_*.cuh.
#include <algorithm>

#include "core/limits.hpp"
#include "simt/ladder.hpp"

namespace tessera::simt {
namespace {

constexpr Function forward{"warp_forward", "warp_forward", "ForwardParams"};
constexpr Function backward{"warp_backward", "warp_backward", "BackwardParams"};

// What every GPU gives a block, so that plans do not depend on the GPU.
constexpr int shared_limit = 48 << 10;
constexpr int warps = 8;

// Copies of dQ, and blocks that share the keys of one sequence and head. A constant, or else the bits of one sequence
// would depend on its neighbours.
constexpr std::int64_t most_splits = 16;

Config forward_config(const Problem& p) {
  constexpr int warp_rows = 4;
  Config c = config_of(p, 32 * warps);
  c.block_rows = warps * warp_rows, c.block_cols = 32, c.wide_loads = false;  // the last is of no use to it
  while (warp_forward_shared_bytes(c) > shared_limit) c.threads /= 2, c.block_rows /= 2;
  return c;
}

// A warp's keys, with k, v and two sums of each of dK and dV, take about 100 registers.
Config backward_config(const Problem& p) {
  const std::int64_t width = p.D + p.Dv;
  const int warp_keys = width <= 256 ? 4 : width <= 512 ? 2 : 1;
  Config c = config_of(p, 32 * warps);
  c.block_rows = 32, c.block_cols = warps * warp_keys, c.wide_loads = false;
  c.blocks_per_sm = width <= 160 ? 2 : 1;  // as many as the registers allow
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

}  // namespace tessera::simt
