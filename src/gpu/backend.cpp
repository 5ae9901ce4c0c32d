// SPDX-License-Identifier: Apache-2.0
// Plans that are compiled and loaded on a GPU, and run; see backend.hpp.
#include "gpu/backend.hpp"

#include <memory>

#include "core/failure.hpp"
#include "core/tensor.hpp"
#include "cuda/jit/cache.hpp"
#include "gpu/unit.hpp"

namespace tessera::gpu {
namespace {

// Parameter blocks begin at multiples of this: a tensor map demands it.
struct alignas(64) Line {
  std::byte bytes[64];
};
constexpr std::size_t lines_of(std::size_t bytes) { return (bytes + sizeof(Line) - 1) / sizeof(Line); }

class GpuPlan : public KernelPlan {
 public:
  GpuPlan(const Problem& problem, Steps steps) : problem(problem), steps(std::move(steps)) {
    for (const Step& step : this->steps.list) {
      kernels.push_back(cuda::find_kernel(step.unit, kernel_symbol, problem.device.id));
      if (step.shared_bytes > 0) kernels.back()->allow_shared(static_cast<unsigned>(step.shared_bytes));
      if (step.cluster > cuda::portable_cluster) kernels.back()->allow_large_clusters();
      lines += lines_of(step.parameter_bytes);
    }
  }

  std::size_t workspace_bytes() const override { return static_cast<std::size_t>(own_at() + steps.own_bytes); }

  CutTiles tiles() const override { return steps.cuts; }

  std::string describe() const override {
    std::string out = text(cuda::properties(problem.device.id).name, ", ", kernels.size(), " launches:");
    for (std::size_t n = 0; n < kernels.size(); ++n) {
      const Step& step = steps.list[n];
      out += text("\n               ", step.name, ": ", step.blocks, " blocks x ", step.threads, " threads, ",
                  kernels[n]->registers(), " registers, ", step.shared_bytes, " bytes of shared memory",
                  step.tiles.empty() ? "" : ", ", step.tiles);
    }
    return out;
  }

  void run(const Call& call) const override {
    const cuda::CurrentDevice current(problem.device.id);
    PassParams common;
    if (problem.pass == Pass::forward) common = forward_params(problem, call, steps.score_scale);
    if (problem.pass == Pass::backward) common = backward_params(problem, call, steps.accumulators, steps.score_scale);
    const Given given{call, common, static_cast<std::byte*>(call.execution.workspace) + own_at()};

    // Every block before the first launch: memory may run out and the driver may refuse a tensor map, and then nothing
    // has been written.
    const auto own_blocks = std::make_unique_for_overwrite<Line[]>(lines);
    Line* block = own_blocks.get();
    for (const Step& step : steps.list) {
      if (step.parameter_bytes > 0) step.write_parameters(given, block);
      block += lines_of(step.parameter_bytes);
    }

    void* const common_block = std::visit([](auto& params) -> void* { return &params; }, common);
    block = own_blocks.get();
    for (std::size_t n = 0; n < kernels.size(); ++n) {
      const Step& step = steps.list[n];
      void* arguments[] = {step.parameter_bytes > 0 ? block : common_block};
      block += lines_of(step.parameter_bytes);
      kernels[n]->launch({.grid = {static_cast<unsigned>(step.blocks)},
                          .block = {static_cast<unsigned>(step.threads)},
                          .shared_bytes = static_cast<unsigned>(step.shared_bytes),
                          .stream = static_cast<cuda::StreamHandle>(call.execution.stream),
                          .cluster = {static_cast<unsigned>(step.cluster)},
                          .programmatic = step.programmatic},
                         arguments);
    }
  }

 private:
  std::int64_t own_at() const {
    const std::int64_t common = gpu::workspace_bytes(problem, steps.accumulators);
    return steps.own_bytes > 0 ? round_up(common, 16) : common;
  }

  Problem problem;
  Steps steps;
  std::vector<const cuda::LoadedKernel*> kernels;  // of the steps
  std::size_t lines = 0;                           // of all parameter blocks
};

// What of a cache a kernel that takes so much of caches does not take; empty: nothing.
std::string cache_text(const Problem& p, Caches taken) {
  if (taken == Caches::all) return "";
  if (p.pages && taken == Caches::none) return "k and v are paged; this kernel takes padded and packed ones";
  if (!has_plain_keys(p) && taken == Caches::none)
    return "k or v has another type than q, or scales; this kernel takes neither";
  if (p.qv) return "qv is given; this kernel makes scores of q and k alone";
  if (p.tree_words > 0 || p.positions) return "a tree mask or positions are given; this kernel takes neither";
  return "";
}

// What of a part of a problem a kernel does not take; empty: nothing.
std::string part_refusal(const Problem& p, bool carries) {
  const std::string part = part_text(p);
  const bool positions = p.seq_row0 || p.seq_col0 || p.seq_batch0;
  if (part.empty() || (carries && p.carried() && !positions)) return "";
  return text("the call is a part (", part, "); ",
              carries ? "this kernel takes states in the forward pass, and positions that all sequences share"
                      : "this kernel takes positions that all sequences share, hopper states in the forward pass",
              ", cpu kernels parts of every kind");
}

}  // namespace

Steps GpuKernel::steps_for(const Problem& p, const Execution& execution) const {
  if (const std::string reason = cache_text(p, algorithm.caches); !reason.empty()) return Steps::refused(reason);
  if (std::string reason = part_refusal(p, algorithm.carries); !reason.empty())
    return Steps::refused(std::move(reason));
  if (const std::string& missing = cuda::find_driver().reason; !missing.empty()) return Steps::refused(missing);
  cuda::Target target = cuda::properties(p.device.id);
  if (const int margin = execution.sm_margin; margin > 0) {
    if (!algorithm.persistent)
      return Steps::refused(
          text("sm_margin is ", margin, "; this kernel is not persistent and takes every multiprocessor"));
    if (margin >= target.multiprocessors)
      return Steps::refused(
          text("sm_margin is ", margin, "; this GPU has ", target.multiprocessors, " multiprocessors"));
    target.multiprocessors -= margin;
  }
  Steps steps = algorithm.plan(p, target);
  const bool others_take_it = cache_text(p, Caches::none).empty();
  if (steps.reason.empty() && algorithm.by_name && others_take_it && !execution.kernel)
    return Steps::refused(algorithm.by_name);
  return steps;
}

PlanOrReason GpuKernel::plan(const Problem& p, const Execution& execution) const {
  Steps steps = steps_for(p, execution);
  if (!steps.reason.empty()) return {nullptr, std::move(steps.reason)};
  return {std::make_unique<GpuPlan>(p, std::move(steps)), ""};
}

std::string GpuKernel::refusal(const Problem& p, const Execution& execution) const {
  return steps_for(p, execution).reason;
}

}  // namespace tessera::gpu
