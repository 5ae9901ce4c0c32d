// The Hopper kernels as kernels of the library: their launches; see kernels.hpp.
#include <numbers>

#include "core/failure.hpp"
#include "core/once.hpp"
#include "core/tensor.hpp"
#include "cuda/device.hpp"
#include "cuda/jit/cache.hpp"
#include "simt/arguments.hpp"
#include "simt/launches.hpp"
#include "simt/unit.hpp"
#include "sm90/backend.hpp"
#include "sm90/kernels.hpp"
#include "sm90/params.hpp"
#include "sm90/plan.hpp"
#include "sm90/unit.hpp"

namespace tessera::sm90 {
namespace {

class HopperPlan : public KernelPlan {
 public:
  HopperPlan(const Problem& problem, const ForwardPlan& plan) :
      problem(problem), plan(plan),
      kernel(cuda::find_kernel(forward_unit_text(plan.config), simt::kernel_symbol, problem.device.id)) {
    kernel->allow_shared(static_cast<unsigned>(layout_of(plan.config).bytes));
    if (counts()) restart = cuda::find_kernel(restart_unit_text(), simt::kernel_symbol, problem.device.id);
  }

  std::size_t workspace_bytes() const override { return counts() ? sizeof(UInt32) : 0; }

  std::string describe() const override {
    const Config& c = plan.config;
    return text(cuda::properties(problem.device.id).name, ", tiles of ", rows_of(c), " queries x ", c.block_keys,
                " keys, ", c.warpgroups, " warpgroups, ", plan.grid, " blocks for ", plan.tiles, " tiles, ",
                layout_of(c).bytes, " bytes of shared memory");
  }

  void run(const Call& call) const override {
    const cuda::CurrentDevice current(problem.device.id);
    const auto stream = static_cast<cuda::StreamHandle>(call.execution.stream);
    auto* taken = counts() ? static_cast<UInt32*>(call.execution.workspace) : nullptr;
    const bool copies_O = plan.config.stages_O && copyable(call.outputs.o);
    ForwardParams params{.q = tensor_map(call.inputs.q, 64),
                         .k = tensor_map(call.inputs.k, plan.config.block_keys),
                         .v = tensor_map(call.inputs.v, plan.config.block_keys),
                         .o = copies_O ? tensor_map(call.outputs.o, 64) : TensorMap{},
                         .call = simt::forward_params(problem, call),
                         .Dv = static_cast<Int32>(problem.Dv),
                         .copies_O = copies_O,
                         .factor = static_cast<float>(score_scale(problem, plan.config) * std::numbers::log2e),
                         .tiles = static_cast<Int32>(plan.tiles),
                         .tiles_per_head = plan.tiles_per_head,
                         .section = plan.section,
                         .taken = taken};
    params.call.x.scale = static_cast<float>(score_scale(problem, plan.config));
    if (taken) {
      void* counter[] = {&taken};
      restart->launch({.grid = {1}, .block = {1}, .stream = stream}, counter);
    }
    void* arguments[] = {&params};
    kernel->launch({.grid = {static_cast<unsigned>(plan.grid)},
                    .block = {static_cast<unsigned>(threads_of(plan.config))},
                    .shared_bytes = static_cast<unsigned>(layout_of(plan.config).bytes),
                    .stream = stream,
                    .programmatic = taken != nullptr},
                   arguments);
  }

 private:
  // Whether blocks take tiles as they come to them.
  bool counts() const { return plan.varied && plan.grid < plan.tiles; }

  Problem problem;
  ForwardPlan plan;
  const cuda::LoadedKernel *kernel, *restart = nullptr;
};

class HopperBackwardPlan : public KernelPlan {
 public:
  HopperBackwardPlan(const Problem& problem, const BackwardPlan& plan) :
      problem(problem), passes(plan.passes), start(plan.start.list, problem.device.id),
      end(plan.end.list, problem.device.id) {
    for (const BackwardPlan::Pass& pass : passes) {
      kernels.push_back(cuda::find_kernel(backward_unit_text(pass.config), simt::kernel_symbol, problem.device.id));
      kernels.back()->allow_shared(static_cast<unsigned>(layout_of(pass.config).bytes));
    }
  }

  std::size_t workspace_bytes() const override { return static_cast<std::size_t>(simt::workspace_bytes(problem, {})); }

  std::string describe() const override {
    std::string out = text(cuda::properties(problem.device.id).name, ", ", start.count() + passes.size() + end.count(),
                           " launches:", start.describe());
    for (const auto& [c, blocks] : passes)
      out += text("\n               ", owns_queries(c) ? "queries (dQ)" : "keys (dK, dV)", ": ", blocks,
                  " blocks, tiles of ", rows_of(c), " x ", c.block_columns, ", ", c.warpgroups,
                  c.paired ? " paired" : "", " warpgroups, ", layout_of(c).bytes, " bytes of shared memory");
    return out + end.describe();
  }

  void run(const Call& call) const override {
    const cuda::CurrentDevice current(problem.device.id);
    const auto stream = static_cast<cuda::StreamHandle>(call.execution.stream);
    simt::BackwardParams params = simt::backward_params(problem, call, {});
    std::vector<BackwardParams> of_passes;  // before the first launch: the driver may refuse a tensor map
    for (const BackwardPlan::Pass& pass : passes) of_passes.push_back(params_of(pass.config, call, params));
    start.run(&params, stream);
    for (std::size_t n = 0; n < passes.size(); ++n) launch(*kernels[n], passes[n], of_passes[n], stream);
    end.run(&params, stream);
  }

 private:
  BackwardParams params_of(const BackwardConfig& c, const Call& call, const simt::BackwardParams& params) const {
    const Tensor &q = call.inputs.q, &k = call.inputs.k, &v = call.inputs.v, &d_o = call.saved.d_o;
    const bool queries = owns_queries(c);
    const double scale = score_scale(problem, Config{.halves_S = c.halves_S});
    BackwardParams all{.X = tensor_map(queries ? q : k, 64),
                       .Y = tensor_map(queries ? d_o : v, 64),
                       .x = tensor_map(queries ? k : q, c.block_columns),
                       .y = tensor_map(queries ? v : d_o, c.block_columns),
                       .call = params,
                       .D = static_cast<Int32>(problem.D),
                       .Dv = static_cast<Int32>(problem.Dv),
                       .factor = static_cast<float>(scale * std::numbers::log2e),
                       .scale = static_cast<float>(problem.options.scale)};
    all.call.x.scale = static_cast<float>(scale);
    return all;
  }

  static void launch(const cuda::LoadedKernel& kernel, const BackwardPlan::Pass& pass, BackwardParams& params,
                     cuda::StreamHandle stream) {
    const BackwardConfig& c = pass.config;
    void* arguments[] = {&params};
    kernel.launch({.grid = {static_cast<unsigned>(pass.blocks)},
                   .block = {static_cast<unsigned>(threads_of(c))},
                   .shared_bytes = static_cast<unsigned>(layout_of(c).bytes),
                   .stream = stream},
                  arguments);
  }

  Problem problem;
  std::vector<BackwardPlan::Pass> passes;
  simt::Launches start, end;
  std::vector<const cuda::LoadedKernel*> kernels;  // of the passes
};

// A plan of the pass, or the reason why there is none.
template <class Plan>
Plan plan_for(const Problem& p, Plan (*planner)(const Problem&, const cuda::Target&)) {
  Plan plan;
  if (p.device.type != DeviceType::cuda)
    plan.reason = text("device is ", name_of(p.device), "; this kernel runs on cuda");
  else if (const std::string& missing = cuda::find_driver().reason; !missing.empty())
    plan.reason = missing;
  else
    plan = planner(p, cuda::properties(p.device.id));
  return plan;
}

class HopperKernel : public Kernel {
 public:
  const char* name() const override { return "hopper"; }
  PlanOrReason plan(const Problem& p, const Execution&) const override {
    if (p.pass == Pass::forward) return loaded<HopperPlan>(p, plan_for(p, plan_forward));
    if (const OnePassPlan plan = plan_for(p, plan_one_pass); plan.reason.empty()) return {load_one_pass(p, plan), ""};
    return loaded<HopperBackwardPlan>(p, plan_for(p, plan_backward));
  }
  std::string refusal(const Problem& p, const Execution&) const override {
    if (p.pass == Pass::forward) return plan_for(p, plan_forward).reason;
    return plan_for(p, plan_one_pass).reason.empty() ? "" : plan_for(p, plan_backward).reason;
  }

 private:
  template <class Loaded, class Plan>
  static PlanOrReason loaded(const Problem& p, Plan plan) {
    if (!plan.reason.empty()) return {nullptr, std::move(plan.reason)};
    return {std::make_unique<Loaded>(p, plan), ""};
  }
};

}  // namespace

std::vector<const Kernel*> kernels() {
  static constinit Once<const HopperKernel> hopper;
  return {&hopper.get([] { return HopperKernel(); })};
}

}  // namespace tessera::sm90
