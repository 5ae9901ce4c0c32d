// The ladder's rungs as kernels of the library: compiled, loaded and launched on a GPU; see kernels.hpp.
#include "core/failure.hpp"
#include "core/tensor.hpp"
#include "cuda/device.hpp"
#include "cuda/jit/cache.hpp"
#include "simt/kernels.hpp"
#include "simt/ladder.hpp"

namespace tessera::simt {
namespace {

class LadderPlan : public KernelPlan {
 public:
  LadderPlan(const Problem& problem, const Steps& steps) : problem(problem), accumulators(steps.accumulators) {
    for (const Step& step : steps.list) {
      const cuda::LoadedKernel* kernel =
          cuda::find_kernel(unit_text(step.function, step.config), kernel_symbol, problem.device.id);
      if (step.shared_bytes > 0) kernel->allow_shared(static_cast<unsigned>(step.shared_bytes));
      launches.push_back({kernel, step});
    }
  }

  std::size_t workspace_bytes() const override { return simt::workspace_bytes(problem, accumulators); }

  std::string describe() const override {
    std::string out = text(cuda::properties(problem.device.id).name, ", ", launches.size(), " launches:");
    for (const auto& [kernel, step] : launches)
      out += text("\n               ", step.function.name, ": ", step.blocks, " blocks x ", step.config.threads,
                  " threads, ", kernel->registers(), " registers, ", step.shared_bytes, " bytes of shared memory");
    return out;
  }

  void run(const Call& call) const override {
    const cuda::CurrentDevice current(problem.device.id);
    ForwardParams forward;
    BackwardParams backward;
    void* params[1] = {&forward};
    if (problem.pass == Pass::forward) forward = forward_params(problem, call);
    if (problem.pass == Pass::backward) backward = backward_params(problem, call, accumulators), params[0] = &backward;
    for (const auto& [kernel, step] : launches)
      kernel->launch({.grid = {static_cast<unsigned>(step.blocks)},
                      .block = {static_cast<unsigned>(step.config.threads)},
                      .shared_bytes = static_cast<unsigned>(step.shared_bytes),
                      .stream = static_cast<cuda::StreamHandle>(call.execution.stream)},
                     params);
  }

 private:
  struct Launch {
    const cuda::LoadedKernel* kernel;
    Step step;
  };
  Problem problem;
  Accumulators accumulators;
  std::vector<Launch> launches;
};

class RungKernel : public Kernel {
 public:
  explicit RungKernel(const Rung& rung) : rung(rung) {}
  const char* name() const override { return rung.name; }
  PlanOrReason plan(const Problem& p, const Execution&) const override {
    Steps steps = steps_for(p);
    if (!steps.reason.empty()) return {nullptr, std::move(steps.reason)};
    return {std::make_unique<LadderPlan>(p, steps), ""};
  }
  std::string refusal(const Problem& p, const Execution&) const override { return steps_for(p).reason; }

 private:
  Steps steps_for(const Problem& p) const {
    std::string reason = common_refusal(p);
    if (reason.empty()) reason = cuda::find_driver().reason;
    if (reason.empty()) return rung.steps(p, cuda::properties(p.device.id));
    return {.list = {}, .accumulators = {}, .reason = std::move(reason)};
  }

  const Rung& rung;
};

}  // namespace

std::vector<const Kernel*> kernels() {
  static const std::vector<RungKernel> list(rungs().begin(), rungs().end());
  std::vector<const Kernel*> all;
  for (const RungKernel& kernel : list) all.push_back(&kernel);
  return all;
}

}  // namespace tessera::simt
