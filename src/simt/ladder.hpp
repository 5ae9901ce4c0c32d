// The ladder: kernels for any NVIDIA GPU, from the simplest to the general one. Each rung plans its launches.
// Included by src/simt and, for the list of algorithms, by src/api/kernels.cpp. docs/adding_a_kernel.md walks through a
// rung.
#pragma once

#include <string>
#include <vector>

#include "gpu/step.hpp"
#include "simt/config.hpp"

namespace tessera::simt {

std::vector<Algorithm> algorithms();  // best first

// dBias, where it is asked for, from delta and LSE, by the kernel of `vector`. Sets the reason if no tile fits. Other
// families whose own kernels do not make it use this one.
void add_bias_gradient(Steps& steps, const Problem& problem, const cuda::Target& target);

// --- what rungs share (ladder.cpp)

Config config_of(const Problem& problem, int threads);

// A device function template of a rung, and which parameters it takes.
struct Function {
  const char* file;        // "naive_forward": of simt/kernel
  const char* name;        // "naive_forward"
  const char* parameters;  // "ForwardParams"
};

// A launch of it.
Step step(const Function& function, const Config& config, std::int64_t blocks, int shared_bytes = 0);

// What the early rungs (`naive`, `tiled`, `warp`) do not take, by name; empty: nothing.
std::string early_refusal(const Problem& problem);

// --- the rungs, each in its own file under rungs/

Steps naive_steps(const Problem& problem, const cuda::Target& target);
Steps tiled_steps(const Problem& problem, const cuda::Target& target);
Steps warp_steps(const Problem& problem, const cuda::Target& target);
Steps vector_steps(const Problem& problem, const cuda::Target& target);
Steps vector_fma_steps(const Problem& problem, const cuda::Target& target);

}  // namespace tessera::simt
