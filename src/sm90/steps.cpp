// SPDX-License-Identifier: Apache-2.0
// The launches of the Hopper kernels: their units, shapes and parameter blocks; see algorithms.hpp.
#include <numbers>

#include "core/failure.hpp"
#include "sm90/algorithms.hpp"
#include "sm90/one_pass_plan.hpp"
#include "sm90/params.hpp"
#include "sm90/plan.hpp"
#include "sm90/tensor_map.hpp"
#include "sm90/unit.hpp"

namespace tessera::sm90 {
namespace {

using gpu::Given;
using gpu::Step;
using gpu::Steps;

// Of products of q and k, so that exponentials are powers of 2.
float factor_of(double score_scale) { return static_cast<float>(score_scale * std::numbers::log2e); }

// --- forward

ForwardParams forward_params(const Problem& p, const ForwardPlan& plan, double scale, UInt32* taken,
                             const Given& given) {
  const Tensor& o = given.call.outputs.o;
  const bool copies_O = plan.config.stages_O && copyable(o);
  const auto keys_map = [&](const Tensor& t) {
    return plan.config.paged ? TensorMap{} : tensor_map(t, plan.config.block_keys);
  };
  return {.q = tensor_map(given.call.inputs.q, 64),
          .k = keys_map(given.call.inputs.k),
          .v = keys_map(given.call.inputs.v),
          .o = copies_O ? tensor_map(o, 64) : TensorMap{},
          .call = given.forward(),
          .Dv = static_cast<Int32>(p.Dv),
          .copies_O = copies_O,
          .factor = factor_of(scale),
          .tiles = static_cast<Int32>(plan.tiles),
          .tiles_per_head = plan.tiles_per_head,
          .section = plan.section,
          .taken = taken};
}

// Of sequences with so many queries, or more.
PagedParams paged_params(const Problem& p, const ForwardPlan& plan, std::int64_t least_queries,
                         const ForwardParams& plain, const Call& call) {
  const Inputs& in = call.inputs;
  PagedParams out{
      plain, {}, {}, gpu::page_tables(p, call), {p.longest_q(), p.longest_k()}, static_cast<Int32>(least_queries)};
  out.call.x.k = gpu::page_ref(in.k), out.call.x.v = gpu::page_ref(in.v);
  const Boxes boxes = boxes_of(plan.config, *p.pages);
  for (int n = boxes.first; n <= boxes.last; ++n)
    out.k_boxes[n] = tensor_map(in.k, 1 << n), out.v_boxes[n] = tensor_map(in.v, 1 << n);
  return out;
}

// Sequences with fewer queries are left to other launches.
Steps forward_steps(const Problem& p, const cuda::Target& target, std::int64_t least_queries) {
  if (p.pass != Pass::forward) return Steps::refused("pass is backward; this kernel is for the forward pass");
  const ForwardPlan plan = plan_forward(p, target);
  if (!plan.reason.empty()) return Steps::refused(plan.reason);
  const Config& c = plan.config;
  Steps steps(p);
  steps.score_scale = score_scale(p);
  if (p.carried()) steps.cuts = {rows_of(c), c.block_keys};
  if (!p.has_queries() || !p.has_keys()) {
    gpu::add_passed_states(steps, p);
    return steps;
  }

  // Blocks that take tiles as they come to them count those that are taken.
  const bool counts = plan.varied && plan.grid < plan.tiles;
  if (counts) {
    steps.own_bytes = sizeof(UInt32);
    Step restart{.name = "hopper_restart", .unit = restart_unit_text(), .blocks = 1, .threads = 1};
    restart.gives<RestartParams>(
        [](const Given& given) { return RestartParams{reinterpret_cast<UInt32*>(given.own)}; });
    steps.add(std::move(restart));
  }

  Step main{.name = "hopper_forward",
            .unit = forward_unit_text(c),
            .blocks = plan.grid,
            .threads = threads_of(c),
            .shared_bytes = layout_of(c).bytes,
            .programmatic = counts,
            .tiles = text(plan.tiles, " tiles of ", rows_of(c), " queries x ", c.block_keys, " keys",
                          c.paged ? " in pages, " : ", ", c.warpgroups, " warpgroups")};
  const auto plain = [p, plan, counts, scale = steps.score_scale](const Given& given) {
    return forward_params(p, plan, scale, counts ? reinterpret_cast<UInt32*>(given.own) : nullptr, given);
  };
  if (c.paged)
    main.gives<PagedParams>(
        [=](const Given& given) { return paged_params(p, plan, least_queries, plain(given), given.call); });
  else if (c.carried)
    main.gives<CarriedParams>([p, plain](const Given& given) {
      return CarriedParams{plain(given), gpu::states_of(p, given.call)};
    });
  else
    main.gives<ForwardParams>(plain);
  steps.add(std::move(main));
  return steps;
}

// --- backward in two passes

Step backward_step(const Problem& p, const BackwardPlan::Pass& pass, double scale) {
  const BackwardConfig& c = pass.config;
  Step step{.name = owns_queries(c) ? "hopper_backward_queries" : "hopper_backward_keys",
            .unit = backward_unit_text(c),
            .blocks = pass.blocks,
            .threads = threads_of(c),
            .shared_bytes = layout_of(c).bytes,
            .tiles = text(owns_queries(c) ? "dQ" : "dK, dV", " by tiles of ", rows_of(c), " x ", c.block_columns, ", ",
                          c.warpgroups, c.paired ? " paired" : "", " warpgroups")};
  step.gives<BackwardParams>([c, scale, D = p.D, Dv = p.Dv](const Given& given) {
    const Tensor &q = given.call.inputs.q, &k = given.call.inputs.k, &v = given.call.inputs.v;
    const Tensor& d_o = given.call.saved.d_o;
    const bool queries = owns_queries(c);
    return BackwardParams{.row_QK = tensor_map(queries ? q : k, 64),
                          .row_VO = tensor_map(queries ? d_o : v, 64),
                          .column_QK = tensor_map(queries ? k : q, c.block_columns),
                          .column_VO = tensor_map(queries ? v : d_o, c.block_columns),
                          .call = given.backward(),
                          .D = static_cast<Int32>(D),
                          .Dv = static_cast<Int32>(Dv),
                          .factor = factor_of(scale)};
  });
  return step;
}

Steps two_pass_steps(const Problem& p, const cuda::Target& target, gpu::AddSteps bias_gradient) {
  if (p.pass != Pass::backward) return Steps::refused("pass is forward; this kernel is for the backward pass");
  const BackwardPlan plan = plan_backward(p, target);
  if (!plan.reason.empty()) return Steps::refused(plan.reason);
  Steps steps(p);
  steps.score_scale = score_scale(p);
  add_backward_start(steps, p);
  for (const BackwardPlan::Pass& pass : plan.passes) steps.add(backward_step(p, pass, steps.score_scale));
  bias_gradient(steps, p, target);
  add_sink_gradient(steps, p);
  return steps;
}

// --- backward in one pass

Step prepare_step(const Problem& p, const OnePassPlan& plan) {
  Step step{.name = "hopper_prepare",
            .unit = prepare_unit_text(plan.config, plan.o, plan.prepare_lanes),
            .blocks = plan.query_blocks,
            .threads = prepare_threads};
  step.gives<PrepareParams>([plan, Dv = p.Dv](const Given& given) {
    return PrepareParams{.call = given.backward(),
                         .memory = memory_of(plan, given.own),
                         .order = plan.order,
                         .Dv = static_cast<Int32>(Dv),
                         .zero = given.own + plan.zeros().at,
                         .zeros = plan.zeros().bytes / 16};
  });
  return step;
}

Step one_pass_step(const Problem& p, const OnePassPlan& plan, double scale) {
  const OnePassConfig& c = plan.config;
  Step step{.name = "hopper_one_pass",
            .unit = one_pass_unit_text(c),
            .blocks = plan.grid,
            .threads = one_pass_threads,
            .shared_bytes = layout_of(c).bytes,
            .programmatic = true,
            .tiles = text(plan.blocks, " tiles of ", one_pass_keys, " keys x ", c.block_queries, " queries, dQ summed ",
                          c.ordered ? "in order" : "as it comes")};
  step.gives<OnePassParams>([plan, scale, D = p.D, Dv = p.Dv](const Given& given) {
    return OnePassParams{.q = tensor_map(given.call.inputs.q, plan.config.block_queries),
                         .k = tensor_map(given.call.inputs.k, 64),
                         .v = tensor_map(given.call.inputs.v, 64),
                         .d_o = tensor_map(given.call.saved.d_o, plan.config.block_queries),
                         .call = given.backward(),
                         .memory = memory_of(plan, given.own),
                         .D = static_cast<Int32>(D),
                         .Dv = static_cast<Int32>(Dv),
                         .factor = factor_of(scale)};
  });
  return step;
}

Step finish_step(const Problem& p, const OnePassPlan& plan) {
  Step step{.name = "hopper_finish",
            .unit = finish_unit_text(plan.config, plan.dQ),
            .blocks = plan.query_blocks,
            .threads = 128 * parts_of(plan.config),
            .programmatic = true};
  step.gives<FinishParams>([plan, D = p.D](const Given& given) {
    return FinishParams{.call = given.backward(), .memory = memory_of(plan, given.own), .D = static_cast<Int32>(D)};
  });
  return step;
}

Steps one_pass_steps(const Problem& p, const cuda::Target& target) {
  if (p.pass != Pass::backward) return Steps::refused("pass is forward; this kernel is for the backward pass");
  const OnePassPlan plan = plan_one_pass(p, target);
  if (!plan.reason.empty()) return Steps::refused(plan.reason);
  Steps steps(p);
  steps.score_scale = score_scale(p);
  steps.own_bytes = plan.own_bytes;
  add_backward_start(steps, p, false);
  steps.add(prepare_step(p, plan));
  steps.add(one_pass_step(p, plan, steps.score_scale));
  steps.add(finish_step(p, plan));
  add_sink_gradient(steps, p);
  return steps;
}

}  // namespace

std::vector<gpu::Algorithm> algorithms(gpu::AddSteps bias_gradient, gpu::AddSteps few_rows) {
  const auto forward = [](const Problem& p, const cuda::Target& target) { return forward_steps(p, target, 1); };
  const auto mixed = [few_rows](const Problem& p, const cuda::Target& target) {
    return gpu::mixed_steps(p, target, "hopper", forward_steps, few_rows);
  };
  const auto two_pass = [bias_gradient](const Problem& p, const cuda::Target& target) {
    return two_pass_steps(p, target, bias_gradient);
  };
  return {{.name = "hopper_mixed", .family = "hopper", .plan = mixed, .caches = gpu::Caches::keys},
          {.name = "hopper",
           .family = "hopper",
           .plan = forward,
           .persistent = true,
           .caches = gpu::Caches::keys,
           .carries = true},
          {.name = "hopper_one_pass", .family = "hopper", .plan = one_pass_steps, .persistent = true},
          {.name = "hopper_two_pass", .family = "hopper", .plan = two_pass}};
}

}  // namespace tessera::sm90
