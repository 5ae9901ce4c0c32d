// SPDX-License-Identifier: Apache-2.0
// `naive`: one thread per row, no shared memory: every other operand is read from global memory each time. The
// baseline. See ladder/ladder.hpp; the kernels are ladder/kernel/naive_*.cuh.
#include "ladder/ladder.hpp"

namespace tessera::ladder {
namespace {

constexpr Function forward{"naive_forward", "naive_forward", "ForwardParams"};
constexpr Function backward_queries{"naive_backward", "naive_backward_queries", "BackwardParams"};
constexpr Function backward_keys{"naive_backward", "naive_backward_keys", "BackwardParams"};

}  // namespace

Steps naive_steps(const Problem& p, const cuda::Target&) {
  Steps steps(p);
  steps.reason = early_refusal(p);
  if (!steps.reason.empty()) return steps;

  constexpr int rows = 64;
  Config c = config_of(p, rows);
  c.wide_loads = false;  // this rung loads element by element
  if (p.pass == Pass::forward) {
    steps.add(step(forward, c, query_blocks(p, rows)));
    return steps;
  }
  add_backward_start(steps, p);
  if (p.dq) steps.add(step(backward_queries, c, query_blocks(p, rows)));
  if (p.dk || p.dv) steps.add(step(backward_keys, c, key_blocks(p, rows)));
  return steps;
}

}  // namespace tessera::ladder
