// SPDX-License-Identifier: Apache-2.0
// A plan for a GPU as data: which launches answer a problem on a GPU of which only the Target is known. Nothing here
// needs a GPU, so the compile gate and `tessera pack` ask the same planners as a real call. A launch is described in
// terms that all families share: no family's configuration is visible here.
// Included by the families' planners and src/api. docs/gpu_kernels.md, "The GPU layer".
#pragma once

#include <cstddef>
#include <functional>
#include <limits>
#include <new>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "cuda/device.hpp"
#include "gpu/arguments.hpp"

namespace tessera::gpu {

using PassParams = std::variant<ForwardParams, BackwardParams>;

// What a call gives to its launches.
struct Given {
  const Call& call;
  const PassParams& common;  // of all launches of the pass
  std::byte* own;            // the family's own part of the workspace

  const ForwardParams& forward() const { return std::get<ForwardParams>(common); }
  const BackwardParams& backward() const { return std::get<BackwardParams>(common); }
};

// One launch: the kernel's unit, the launch's shape, and its parameter block.
struct Step {
  std::string name;  // of the kernel, for people: "vector_forward"
  std::string unit;
  std::int64_t blocks = 0;
  int threads = 0;
  int shared_bytes = 0;       // dynamic
  bool programmatic = false;  // may start before the launch before it ends, and waits for it itself
  int cluster = 1;            // blocks of a cluster
  std::string tiles = "";     // for people: "tiles of 128 queries x 128 keys"

  // The parameter block; without one of its own a kernel is given the common parameters of the pass.
  std::size_t parameter_bytes = 0;
  std::function<void(const Given&, void* block)> write_parameters = nullptr;

  // `make` turns a Given into Params.
  template <class Params, class Make>
  void gives(Make make) {
    static_assert(std::is_trivially_copyable_v<Params> && sizeof(Params) <= 4096, "what every GPU takes");
    parameter_bytes = sizeof(Params);
    write_parameters = [make](const Given& given, void* block) { new (block) Params(make(given)); };
  }
};

// Launches in the order of the stream, and what they need of the workspace. Or the reason why there is no plan, which
// names the option, its value and the rule.
struct Steps {
  std::vector<Step> list;
  Accumulators accumulators;
  std::int64_t own_bytes = 0;  // of the workspace, behind delta, LSE and the accumulators
  double score_scale = 0;      // see Question
  CutTiles cuts{};             // of a carried forward pass
  std::string reason;

  explicit Steps(const Problem& problem) : score_scale(problem.options.scale) {}
  static Steps refused(std::string reason);

  // A launch without blocks is left out. One with more than a grid can have is a reason not to plan.
  void add(Step step);

 private:
  Steps() = default;
};

// Blocks of one launch, in one dimension, on every GPU.
inline constexpr std::int64_t most_blocks = std::numeric_limits<std::int32_t>::max();

// How an algorithm plans: every GPU kernel of the library is one of these, with a name.
using Planner = std::function<Steps(const Problem& problem, const cuda::Target& target)>;

// Which of what engines' caches need an algorithm takes: nothing; keys, that is pages, K and V of types of their own
// and scales, as far as its planner does; all, that is qv, trees and positions of queries, too.
enum class Caches { none, keys, all };

struct Algorithm {
  const char* name;    // that Execution::kernel may ask for: "hopper_one_pass"
  const char* family;  // "hopper": asking for it takes the best one of the family
  Planner plan;
  // Why a call that another algorithm takes gets it only by asking for it; null: it is chosen like any other. Caches
  // that nothing else takes are its own without asking.
  const char* by_name = nullptr;
  bool persistent = false;  // its main launch has as many blocks as the target has multiprocessors, or fewer
  Caches caches = Caches::none;
  bool carries = false;  // a forward pass with states, and part-invariant
};

// Where one family fills a gap with another's kernel: adds launches, or sets the reason why it cannot.
using AddSteps = void (*)(Steps& steps, const Problem& problem, const cuda::Target& target);

// Batches of prompts and of decoding sequences over pages, in one call: the launches of `many` take the sequences of so
// many queries or more, those of `few_rows` the others. Which is which is found out on the device. `name`: of the
// family's kernel for batches without such a difference.
using ManyRows = Steps (*)(const Problem& problem, const cuda::Target& target, std::int64_t least_queries);
Steps mixed_steps(const Problem& problem, const cuda::Target& target, const char* name, ManyRows many,
                  AddSteps few_rows);

// --- the launches around a family's own (row_steps.cpp)

// A carried forward pass without keys: rows keep their state, or are finished.
void add_passed_states(Steps& steps, const Problem& problem);

// What every backward pass begins with: rows that no sequence uses and the accumulators that the steps ask for are
// cleared, delta and LSE prepared, unless a kernel of the family does that.
void add_backward_start(Steps& steps, const Problem& problem, bool with_delta = true);

// The end of a backward pass that sums in the workspace: the accumulators become the gradients.
void add_conversion(Steps& steps, const Problem& problem);

// dSink, where it is asked for, from delta and LSE.
void add_sink_gradient(Steps& steps, const Problem& problem);

}  // namespace tessera::gpu
