// SPDX-License-Identifier: Apache-2.0
// The Vulkan kernels as kernels of the library; see backend.hpp.
#include "vulkan/backend.hpp"

#include <array>
#include <cstring>

#include "core/failure.hpp"
#include "core/once.hpp"
#include "core/tensor.hpp"
#include "gpu/arguments.hpp"
#include "vulkan/params.hpp"
#include "vulkan/plan.hpp"

namespace tessera::vulkan {
namespace {

Int32 kind_of(Type type) { return type == Type::f32 ? 0 : type == Type::f16 ? 1 : 2; }
Int32 kind_of(const std::optional<Type>& type) { return type ? kind_of(*type) : 0; }

Kinds kinds(const Problem& p) {
  return {.q = kind_of(p.q_type),
          .o = kind_of(p.o_type),
          .d_o = kind_of(p.d_o),
          .dq = kind_of(p.dq),
          .dk = kind_of(p.dk),
          .dv = kind_of(p.dv),
          .bias = p.bias ? kind_of(p.bias->type) : 0,
          .dbias = kind_of(p.dbias)};
}

Launch launch(const Problem& p, std::int64_t blocks) {
  const ScoreOptions on = p.score_options();
  return {.blocks = blocks,
          .D = static_cast<Int32>(p.D),
          .Dv = static_cast<Int32>(p.Dv),
          .softcap = on.softcap,
          .alibi = on.alibi,
          .bias = on.bias,
          .mask = on.mask,
          .dropout = on.dropout,
          .reserved = 0};
}

class VulkanPlan : public KernelPlan {
 public:
  VulkanPlan(const Problem& problem, Steps steps) : problem(problem), steps(std::move(steps)) {}

  std::size_t workspace_bytes() const override { return static_cast<std::size_t>(gpu::workspace_bytes(problem, {})); }

  std::string describe() const override {
    std::string out = text(steps.list.size(), steps.list.size() == 1 ? " dispatch:" : " dispatches:");
    for (const Step& step : steps.list)
      out += text("\n               ", step.name, ": ", step.blocks, " workgroups of 64 invocations");
    return out;
  }

  void run(const Call& call) const override {
    auto* const queue = static_cast<tessera_vulkan_queue*>(call.execution.stream);
    DeviceContext& device = queue ? device_of(*queue) : own_device(problem.device.id);
    if (const std::string reason = refusal(steps, device.facts()); !reason.empty())
      throw Failure(TESSERA_UNSUPPORTED, reason);
    if (problem.pass == Pass::forward)
      enqueue(device, queue,
              ForwardBlock{gpu::forward_params(problem, call, problem.options.scale), {}, kinds(problem)});
    else
      enqueue(device, queue,
              BackwardBlock{gpu::backward_params(problem, call, {}, problem.options.scale), {}, kinds(problem)});
  }

  void compile(DeviceContext& device) const {
    for (const Step& step : steps.list) device.pipeline(*step.shader, step.constants);
  }

 private:
  template <class Block>
  void enqueue(DeviceContext& device, tessera_vulkan_queue* queue, const Block& common) const {
    std::vector<Block> blocks(steps.list.size(), common);
    std::vector<Dispatch> list;
    for (std::size_t n = 0; n < steps.list.size(); ++n) {
      const Step& step = steps.list[n];
      blocks[n].launch = launch(problem, step.blocks);
      list.push_back(
          {device.pipeline(*step.shader, step.constants), std::as_bytes(std::span(&blocks[n], 1)), step.blocks});
    }
    device.run(list, queue);
  }

  Problem problem;
  Steps steps;
};

class VulkanKernel : public Kernel {
 public:
  VulkanKernel(const char* name, Steps (*planner)(const Problem&)) : own_name(name), planner(planner) {}
  const char* name() const override { return own_name; }

  PlanOrReason plan(const Problem& p, const Execution& execution) const override {
    Steps steps = steps_for(p, execution);
    if (!steps.reason.empty()) return {nullptr, std::move(steps.reason)};
    auto plan = std::make_unique<VulkanPlan>(p, std::move(steps));
    if (!execution.stream) plan->compile(own_device(p.device.id));
    return {std::move(plan), ""};
  }
  std::string refusal(const Problem& p, const Execution& execution) const override {
    return steps_for(p, execution).reason;
  }

 private:
  // Without a stream the library's own device is asked what it can; a caller's is when the plan runs.
  Steps steps_for(const Problem& p, const Execution& execution) const {
    Steps steps = planner(p);
    if (!steps.reason.empty() || execution.stream) return steps;
    steps.reason = missing_devices();
    if (steps.reason.empty()) steps.reason = vulkan::refusal(steps, own_device(p.device.id).facts());
    return steps;
  }

  const char* own_name;
  Steps (*planner)(const Problem&);
};

}  // namespace

std::span<const Kernel* const> kernels() {
  struct Rungs {
    VulkanKernel tiled{"vk_tiled", plan_tiled}, naive{"vk_naive", plan_naive};
    std::array<const Kernel*, 2> all{&tiled, &naive};
  };
  static constinit Once<const Rungs> made;
  return made.get([] { return Rungs(); }).all;
}

}  // namespace tessera::vulkan
