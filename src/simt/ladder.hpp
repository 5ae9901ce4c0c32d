// The ladder's rungs as data: which launches answer a problem on a GPU of which only the Target is known. Nothing here
// needs a GPU, so the compile gate and `tessera pack` ask the same planner as a real call.
// Included by src/simt, the compile gate and `tessera pack`. docs/adding_a_kernel.md walks through a rung.
#pragma once

#include <limits>
#include <span>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "cuda/device.hpp"
#include "simt/arguments.hpp"
#include "simt/unit.hpp"

namespace tessera::simt {

// One launch: a kernel and the grid it runs on.
struct Step {
  Function function;
  Config config;
  std::int64_t blocks;
  int shared_bytes = 0;  // dynamic
};

// A plan: launches in the order of the stream, and what they need of the workspace. Or the reason why there is none,
// which names the option, its value and the rule.
struct Steps {
  std::vector<Step> list;
  Accumulators accumulators;
  std::string reason;

  // A launch without blocks is left out. One with more than a grid can have is a reason not to plan.
  void add(const Function& function, const Config& config, std::int64_t blocks, int shared_bytes = 0);
};

// Blocks of one launch, in one dimension, on every GPU.
inline constexpr std::int64_t most_blocks = std::numeric_limits<std::int32_t>::max();

struct Rung {
  const char* name;
  Steps (*steps)(const Problem& problem, const cuda::Target& target);
};

std::span<const Rung> rungs();  // best first

// --- what rungs share (ladder.cpp)

// What every backward pass begins with: rows that no sequence uses and the accumulators that the steps ask for are
// cleared, delta and LSE prepared, unless a kernel of the rung does that.
void add_backward_start(Steps& steps, const Problem& problem, bool with_delta = true);

// The end of a backward pass with accumulators: the gradients are written from them.
void add_conversion(Steps& steps, const Problem& problem);

// dSink, where it is asked for, from delta and LSE.
void add_sink_gradient(Steps& steps, const Problem& problem);

// dBias, where it is asked for, from delta and LSE, by the kernel of `vector`. Sets the reason if no tile fits.
void add_bias_gradient(Steps& steps, const Problem& problem, const cuda::Target& target);

// Why no rung can take the problem, whatever its options; empty: some can.
std::string common_refusal(const Problem& problem);

// What the early rungs (`naive`, `tiled`, `warp`) do not take, by name; empty: nothing.
std::string early_refusal(const Problem& problem);

// --- the rungs, each in its own file under rungs/

Steps naive_steps(const Problem& problem, const cuda::Target& target);
Steps tiled_steps(const Problem& problem, const cuda::Target& target);
Steps warp_steps(const Problem& problem, const cuda::Target& target);
Steps vector_steps(const Problem& problem, const cuda::Target& target);
Steps vector_fma_steps(const Problem& problem, const cuda::Target& target);

}  // namespace tessera::simt
