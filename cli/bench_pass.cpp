// SPDX-License-Identifier: Apache-2.0
// Tensors and planned passes of `tessera bench`; see cli/bench_pass.hpp.
#include "cli/bench_pass.hpp"

#include <algorithm>

namespace tessera::cli {

BenchPass::BenchPass(const BenchShape& shape, const Execution& base) : shape(shape), execution(base) {
  const std::vector<std::int64_t> size{shape.B, shape.N, shape.H, shape.D};
  q = random_normal(shape.type, size, 1), k = random_normal(shape.type, size, 2);
  v = random_normal(shape.type, size, 3), d_o = random_normal(shape.type, size, 4);
  for (Array* array : {&dq, &dk, &dv}) *array = Array(shape.type, size);
  for (Saved& pass : saved) {
    results.push_back(Array(shape.type, size));
    pass.o = results.back().view();
    results.push_back(Array(Type::f32, {shape.B, shape.H, shape.N}));
    pass.lse = results.back().view();
    pass.d_o = d_o.view();
  }
  inputs.q = q.view(), inputs.k = k.view(), inputs.v = v.view();
  gradients.dq = dq.view(), gradients.dk = dk.view(), gradients.dv = dv.view();
  std::size_t bytes = 0;
  for (const bool causal : {false, true}) {
    Options options;
    options.causal = causal;
    forward_plans.push_back(Plan::forward(inputs, outputs(causal), options, base));
    backward_plans.push_back(Plan::backward(inputs, saved[causal], gradients, options, base));
    bytes = std::max({bytes, forward_plans.back().workspace_size(), backward_plans.back().workspace_size()});
  }
  workspace = Array(Type::u8, {static_cast<std::int64_t>(bytes)});
  execution.workspace = workspace.data<void>();
  execution.workspace_bytes = bytes;
  for (const bool causal : {false, true}) {
    run(false, causal);  // O and LSE for the backward pass
    if (shape.backward) run(true, causal);
  }
}

void BenchPass::run(bool backward, bool causal) {
  Options options;
  options.causal = causal;
  if (backward) backward_plans[causal].run(inputs, saved[causal], gradients, options, execution);
  if (!backward) forward_plans[causal].run(inputs, outputs(causal), options, execution);
}

}  // namespace tessera::cli
