// SPDX-License-Identifier: Apache-2.0
// The tensors of one shape of `tessera bench`, and its pass ready to run, full and causal.
// Included by cli/bench.cpp and cli/bench_scaling.cpp.
// Inputs are normally distributed: zeros would be faster and mean nothing.
#pragma once

#include <string>
#include <vector>

#include "cli/bench.hpp"
#include "tessera/tessera.hpp"

namespace tessera::cli {

class BenchPass {
 public:
  BenchPass(const BenchShape& shape, const Execution& execution);  // runs everything once
  void run(bool causal) { run(shape.backward, causal); }
  std::string kernel() const { return (shape.backward ? backward_plans : forward_plans)[0].kernel(); }

 private:
  void run(bool backward, bool causal);
  Outputs outputs(bool causal) const { return {.o = saved[causal].o, .lse = saved[causal].lse}; }

  BenchShape shape;
  Execution execution;
  Array q, k, v, d_o, dq, dk, dv, workspace;
  std::vector<Array> results;
  Inputs inputs;
  Saved saved[2];
  Gradients gradients;
  std::vector<Plan> forward_plans, backward_plans;  // full, causal
};

}  // namespace tessera::cli
