// SPDX-License-Identifier: Apache-2.0
// The ladder: kernels for any NVIDIA GPU, one optimisation after another, from a thread per row (`naive`) to the
// general one (`vector`). Each kernel is a rung and plans its launches. Included by src/ladder and, for the list of
// algorithms, by src/api/kernels.cpp. docs/adding_a_kernel.md walks through a rung.
#pragma once

#include <string>
#include <vector>

#include "gpu/step.hpp"
#include "ladder/config.hpp"

namespace tessera::ladder {

std::vector<Algorithm> algorithms();  // best first

// Adds the launch that computes dBias, if the problem asks for it: the kernel of `vector`, which reads delta and LSE.
// Sets the reason if no tile fits shared memory. Families without a dBias kernel of their own use this one.
void add_bias_gradient(Steps& steps, const Problem& problem, const cuda::Target& target);

// --- what rungs share (ladder.cpp)

Config config_of(const Problem& problem, int threads);

// A device function template of a rung, and which parameters it takes.
struct Function {
  const char* file;        // "naive_forward": of ladder/kernel
  const char* name;        // "naive_forward"
  const char* parameters;  // "ForwardParams"
};

// One launch of it, specialised for `config`.
Step step(const Function& function, const Config& config, std::int64_t blocks, int shared_bytes = 0);

// Why the early rungs (`naive`, `tiled`, `warp`) refuse a problem: the first option that they lack. Empty: they take
// it.
std::string early_refusal(const Problem& problem);

// --- the rungs, each in its own file under rungs/

Steps naive_steps(const Problem& problem, const cuda::Target& target);
Steps tiled_steps(const Problem& problem, const cuda::Target& target);
Steps warp_steps(const Problem& problem, const cuda::Target& target);
Steps vector_steps(const Problem& problem, const cuda::Target& target);
Steps vector_fma_steps(const Problem& problem, const cuda::Target& target);

}  // namespace tessera::ladder
