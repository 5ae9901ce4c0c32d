// The one-pass backward kernel as a plan of the library: its three launches; see backend.hpp.
#include <numbers>

#include "core/failure.hpp"
#include "cuda/device.hpp"
#include "cuda/jit/cache.hpp"
#include "simt/arguments.hpp"
#include "simt/launches.hpp"
#include "sm90/backend.hpp"
#include "sm90/params.hpp"
#include "sm90/plan.hpp"
#include "sm90/unit.hpp"

namespace tessera::sm90 {
namespace {

class HopperOnePassPlan : public KernelPlan {
 public:
  HopperOnePassPlan(const Problem& problem, const OnePassPlan& plan) :
      problem(problem), plan(plan), start(plan.start.list, problem.device.id), end(plan.end.list, problem.device.id),
      prepare(find(prepare_unit_text(plan.config, plan.o, plan.prepare_lanes))),
      main(find(one_pass_unit_text(plan.config))), finish(find(finish_unit_text(plan.config, plan.dQ))) {
    main->allow_shared(static_cast<unsigned>(layout_of(plan.config).bytes));
  }

  std::size_t workspace_bytes() const override { return static_cast<std::size_t>(plan.workspace_bytes); }

  std::string describe() const override {
    const OnePassConfig& c = plan.config;
    return text(cuda::properties(problem.device.id).name, ", ", start.count() + 3 + end.count(),
                " launches:", start.describe(), "\n               prepare: ", plan.query_blocks,
                " blocks\n               one pass (dQ, dK, dV): ", plan.blocks, " blocks, tiles of ", one_pass_keys,
                " keys x ", c.block_queries, " queries, ", layout_of(c).bytes, " bytes of shared memory, dQ summed ",
                c.ordered ? "in order" : "as it comes", "\n               finish (dQ): ", plan.query_blocks, " blocks",
                end.describe());
  }

  void run(const Call& call) const override {
    const cuda::CurrentDevice current(problem.device.id);
    const auto stream = static_cast<cuda::StreamHandle>(call.execution.stream);
    simt::BackwardParams params = simt::backward_params(problem, call, {});
    const OnePassMemory memory = memory_of(plan, call.execution.workspace);
    const OnePassPlan::Part zeros = plan.zeros();

    PrepareParams before{.call = params,
                         .memory = memory,
                         .Dv = static_cast<Int32>(problem.Dv),
                         .zero = static_cast<char*>(call.execution.workspace) + zeros.at,
                         .zeros = zeros.bytes / 16};
    OnePassParams all{.q = tensor_map(call.inputs.q, plan.config.block_queries),
                      .k = tensor_map(call.inputs.k, 64),
                      .v = tensor_map(call.inputs.v, 64),
                      .d_o = tensor_map(call.saved.d_o, plan.config.block_queries),
                      .call = params,
                      .memory = memory,
                      .D = static_cast<Int32>(problem.D),
                      .Dv = static_cast<Int32>(problem.Dv),
                      .factor = static_cast<float>(score_scale(problem, Config{}) * std::numbers::log2e)};
    FinishParams after{.call = params, .memory = memory, .D = static_cast<Int32>(problem.D)};

    // The driver may have refused a tensor map; from here on nothing is made any more.
    start.run(&params, stream);
    launch(*prepare, plan.query_blocks, prepare_threads, 0, stream, false, &before);
    launch(*main, plan.grid, one_pass_threads, layout_of(plan.config).bytes, stream, true, &all);
    launch(*finish, plan.query_blocks, 128 * parts_of(plan.config), 0, stream, true, &after);
    end.run(&params, stream);
  }

 private:
  const cuda::LoadedKernel* find(const std::string& text) const {
    return cuda::find_kernel(text, simt::kernel_symbol, problem.device.id);
  }

  // `programmatic`: may start before the launch before it has ended, and waits for it itself.
  static void launch(const cuda::LoadedKernel& kernel, std::int64_t blocks, int threads, int shared_bytes,
                     cuda::StreamHandle stream, bool programmatic, void* params) {
    if (blocks == 0) return;
    void* arguments[] = {params};
    kernel.launch({.grid = {static_cast<unsigned>(blocks)},
                   .block = {static_cast<unsigned>(threads)},
                   .shared_bytes = static_cast<unsigned>(shared_bytes),
                   .stream = stream,
                   .programmatic = programmatic},
                  arguments);
  }

  Problem problem;
  OnePassPlan plan;
  simt::Launches start, end;
  const cuda::LoadedKernel *prepare, *main, *finish;
};

}  // namespace

std::unique_ptr<KernelPlan> load_one_pass(const Problem& problem, const OnePassPlan& plan) {
  return std::make_unique<HopperOnePassPlan>(problem, plan);
}

}  // namespace tessera::sm90
