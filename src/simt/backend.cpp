// The ladder's rungs as kernels of the library: compiled, loaded and launched on a GPU; see kernels.hpp.
#include "core/failure.hpp"
#include "core/once.hpp"
#include "core/tensor.hpp"
#include "cuda/device.hpp"
#include "simt/kernels.hpp"
#include "simt/launches.hpp"

namespace tessera::simt {
namespace {

class LadderPlan : public KernelPlan {
 public:
  LadderPlan(const Problem& problem, const Steps& steps) :
      problem(problem), accumulators(steps.accumulators), launches(steps.list, problem.device.id) {}

  std::size_t workspace_bytes() const override {
    return static_cast<std::size_t>(simt::workspace_bytes(problem, accumulators));
  }

  std::string describe() const override {
    return text(cuda::properties(problem.device.id).name, ", ", launches.count(), " launches:", launches.describe());
  }

  void run(const Call& call) const override {
    const cuda::CurrentDevice current(problem.device.id);
    ForwardParams forward;
    BackwardParams backward;
    void* params = &forward;
    if (problem.pass == Pass::forward) forward = forward_params(problem, call);
    if (problem.pass == Pass::backward) backward = backward_params(problem, call, accumulators), params = &backward;
    launches.run(params, static_cast<cuda::StreamHandle>(call.execution.stream));
  }

 private:
  Problem problem;
  Accumulators accumulators;
  Launches launches;
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
  static constinit Once<const std::vector<RungKernel>> list;
  std::vector<const Kernel*> all;
  for (const RungKernel& kernel : list.get([] { return std::vector<RungKernel>(rungs().begin(), rungs().end()); }))
    all.push_back(&kernel);
  return all;
}

}  // namespace tessera::simt
