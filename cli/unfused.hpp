// SPDX-License-Identifier: Apache-2.0
// Unfused attention, which materialises S and P in memory: what a program without a fused kernel does, reasonably
// optimised. Included by cli/demo.cpp, as the baseline of a realistic problem. Formulas: docs/algorithm.md. A fair
// baseline: register- and cache-blocked matrix products with the widest vectors of the machine, heads in parallel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::cli {

// f32, one sequence, tensors [tokens, heads, dim]; tokens and dim are multiples of 64.
struct UnfusedProblem {
  std::int64_t heads = 0, tokens = 0, dim = 0;
  bool causal = false;
  int threads = 1;
  const float *q = nullptr, *k = nullptr, *v = nullptr;
};

// The whole N x N matrix of every head is computed and then masked, and P is kept from the forward pass to the
// backward pass, as a framework without a fused kernel keeps it.
class Unfused {
 public:
  explicit Unfused(const UnfusedProblem& problem);

  void forward(float* o);
  void backward(const float* d_o, const float* o, float* dq, float* dk, float* dv);

  std::size_t forward_bytes() const;   // allocated besides the tensors, in the forward pass
  std::size_t backward_bytes() const;  // likewise at the end of the backward pass: P is still there
  static std::size_t total_bytes(const UnfusedProblem& problem);

 private:
  UnfusedProblem problem;
  int threads;
  std::vector<std::vector<float>> P;           // per head, [tokens, row]
  std::vector<std::vector<float>> transposed;  // per thread: K or V of one head as [dim, tokens]
  std::vector<std::vector<float>> dS;          // per thread, [tokens, row]; only for the backward pass
};

}  // namespace tessera::cli
