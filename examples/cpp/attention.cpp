// SPDX-License-Identifier: Apache-2.0
// Attention with Tessera from C++: forward, backward, a plan that is made once, and what an error looks like.
// A program of its own: copy it. Builds against an installed library, with CMake or pkg-config.
// What is computed: docs/algorithm.md.
#include <cstdio>
#include <random>
#include <tessera/tessera.hpp>
#include <vector>

int main() {
  using tessera::Tensor, tessera::Type;
  constexpr std::int64_t batch = 2, tokens = 256, heads = 4, dim = 64;
  constexpr std::size_t size = batch * tokens * heads * dim;

  // Your memory. Tessera only looks at it, through views: pointer, type, shape [batch, tokens, heads, dim].
  std::vector<float> q(size), k(size), v(size), o(size), lse(batch * heads * tokens);
  std::vector<float> d_o(size, 1.0f), dq(size), dk(size), dv(size);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (auto* tensor : {&q, &k, &v})
    for (float& x : *tensor) x = normal(random);
  const auto view = [](std::vector<float>& data) {
    return Tensor(data.data(), Type::f32, {batch, tokens, heads, dim});
  };

  tessera::Inputs inputs;
  inputs.q = view(q), inputs.k = view(k), inputs.v = view(v);
  const Tensor lse_view(lse.data(), Type::f32, {batch, heads, tokens});
  tessera::Options options;
  options.causal = true;  // everything else keeps its default: scale 1/sqrt(dim), no window, no dropout ...

  try {
    // Forward: O, and the logarithm of every row's sum, which the backward pass needs.
    tessera::forward(inputs, {.o = view(o), .lse = lse_view}, options);

    // Backward: the gradient of O comes in, those of Q, K and V go out. Leave out the ones that you do not need.
    tessera::Saved saved{.o = view(o), .lse = lse_view, .d_o = view(d_o), .d_lse = {}};
    tessera::Gradients gradients{.dq = view(dq), .dk = view(dk), .dv = view(dv), .dbias = {}, .dsinks = {}};
    tessera::backward(inputs, saved, gradients, options);

    // The same call many times: plan once, bring your own workspace, and nothing is allocated any more.
    const auto plan = tessera::Plan::forward(inputs, {.o = view(o), .lse = lse_view}, options);
    std::vector<char> workspace(plan.workspace_size());
    tessera::Execution execution;
    execution.workspace = workspace.data(), execution.workspace_bytes = workspace.size();
    for (int step = 0; step < 3; ++step) plan.run(inputs, {.o = view(o), .lse = lse_view}, options, execution);

    std::printf("kernel %s, O[0] = %.6f, dQ[last] = %.3e\n", plan.kernel().c_str(), o.front(), dq.back());
  } catch (const tessera::Error& error) {
    std::fprintf(stderr, "attention failed: %s\n", error.what());
    return 1;
  }

  // The first row of a causal problem sees one key, so its output is that key's value: a check that anyone can do.
  if (o[0] != v[0]) return std::fprintf(stderr, "O[0] should be V[0]\n"), 1;

  // An error is one sentence that names the argument, its value and the rule. Nothing has been written then.
  try {
    options.softcap = -1;
    tessera::forward(inputs, {.o = view(o), .lse = {}}, options);
    return std::fprintf(stderr, "a negative softcap should be an error\n"), 1;
  } catch (const tessera::Error& error) {
    std::printf("an error reads: %s\n", error.what());
  }
  return 0;
}
