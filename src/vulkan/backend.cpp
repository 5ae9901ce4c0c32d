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

using Planner = Steps(const Problem&, const MatrixFacts&);

class VulkanPlan : public KernelPlan {
 public:
  VulkanPlan(const Problem& problem, Planner* planner, const MatrixFacts& facts, Steps steps) :
      problem(problem), planner(planner), facts(facts), steps(std::move(steps)) {}

  std::size_t workspace_bytes() const override { return static_cast<std::size_t>(gpu::workspace_bytes(problem, {})); }

  std::string describe() const override {
    std::string out = text(steps.list.size(), steps.list.size() == 1 ? " dispatch:" : " dispatches:");
    for (const Step& step : steps.list) out += text("\n               ", step.name, ": ", step.blocks, " workgroups");
    if (!steps.note.empty()) out += "\n               " + steps.note;
    return out;
  }

  void run(const Call& call) const override {
    auto* const queue = static_cast<tessera_vulkan_queue*>(call.execution.stream);
    DeviceContext& device = queue ? device_of(*queue) : own_device(problem.device.id);
    Steps own = steps;
    if (device.facts().matrices != facts)
      own = planner(problem, device.facts().matrices);  // another device than planned
    std::string reason = own.reason.empty() ? refusal(own, device.facts()) : own.reason;
    if (!reason.empty()) throw Failure(TESSERA_UNSUPPORTED, reason);
    if (problem.pass == Pass::forward)
      enqueue(device, own, queue,
              ForwardBlock{gpu::forward_params(problem, call, problem.options.scale), {}, kinds(problem)});
    else
      enqueue(device, own, queue,
              BackwardBlock{gpu::backward_params(problem, call, {}, problem.options.scale), {}, kinds(problem)});
  }

  void compile(DeviceContext& device) const {
    for (const Step& step : steps.list) device.pipeline(*step.shader, step.constants);
  }

 private:
  template <class Block>
  void enqueue(DeviceContext& device, const Steps& own, tessera_vulkan_queue* queue, const Block& common) const {
    std::vector<Block> blocks(own.list.size(), common);
    std::vector<Dispatch> list;
    for (std::size_t n = 0; n < own.list.size(); ++n) {
      const Step& step = own.list[n];
      blocks[n].launch = launch(problem, step.blocks);
      list.push_back(
          {device.pipeline(*step.shader, step.constants), std::as_bytes(std::span(&blocks[n], 1)), step.blocks});
    }
    device.run(list, queue);
  }

  Problem problem;
  Planner* planner;
  MatrixFacts facts;  // that the steps were made for
  Steps steps;
};

constexpr const char* by_name =
    "not all tests of this kernel have ended on a GPU yet; a call gets it if it asks for it by name";

class VulkanKernel : public Kernel {
 public:
  VulkanKernel(const char* name, Planner* planner) : own_name(name), planner(planner) {}
  const char* name() const override { return own_name; }
  DeviceType device() const override { return DeviceType::vulkan; }

  PlanOrReason plan(const Problem& p, const Execution& execution) const override {
    Made made = steps_for(p, execution);
    if (!made.steps.reason.empty()) return {nullptr, std::move(made.steps.reason)};
    auto plan = std::make_unique<VulkanPlan>(p, planner, made.facts, std::move(made.steps));
    if (!execution.stream) plan->compile(own_device(p.device.id));
    return {std::move(plan), ""};
  }
  std::string refusal(const Problem& p, const Execution& execution) const override {
    return steps_for(p, execution).steps.reason;
  }

 private:
  struct Made {
    Steps steps;
    MatrixFacts facts;
  };

  // Without a stream the library's own device is asked what it can; of a caller's, only its matrices: the rest when the
  // plan runs.
  Made steps_for(const Problem& p, const Execution& execution) const {
    Made made;
    const bool own = !execution.stream, unasked = planner == plan_matrix && !execution.kernel;
    if (own) made.steps.reason = missing_devices();
    if (!own && unasked) made.steps.reason = by_name;
    if (!made.steps.reason.empty()) return made;
    const Facts* facts = nullptr;
    if (own) facts = &own_device(p.device.id).facts();
    if (!own && planner == plan_matrix)
      facts = &device_of(*static_cast<tessera_vulkan_queue*>(execution.stream)).facts();
    if (facts) made.facts = facts->matrices;
    made.steps = planner(p, made.facts);
    if (made.steps.reason.empty() && own) made.steps.reason = vulkan::refusal(made.steps, *facts);
    if (made.steps.reason.empty() && unasked) made.steps.reason = by_name;
    return made;
  }

  const char* own_name;
  Planner* planner;
};

}  // namespace

std::span<const Kernel* const> kernels() {
  struct Rungs {
    VulkanKernel matrix{"vk_matrix", plan_matrix}, tiled{"vk_tiled", plan_tiled}, naive{"vk_naive", plan_naive};
    std::array<const Kernel*, 3> all{&matrix, &tiled, &naive};
  };
  static constinit Once<const Rungs> made;
  return made.get([] { return Rungs(); }).all;
}

}  // namespace tessera::vulkan
