// The GPU kernels' units; see units.hpp.
#include "api/units.hpp"

#include <cmath>

#include "core/failure.hpp"
#include "core/tensor.hpp"
#include "simt/ladder.hpp"
#include "sm90/one_pass_plan.hpp"
#include "sm90/plan.hpp"
#include "sm90/unit.hpp"

namespace tessera::api {

std::vector<GpuPlan> gpu_plans(const Problem& problem, const cuda::Target& target) {
  const std::string variant = text(name_of(problem.q_type), " D=", text_of(HeadDims{problem.D, problem.Dv}));
  std::vector<GpuPlan> plans;
  const auto unit = [&](const char* kernel, std::string text) {
    return cuda::NamedUnit{kernel, variant, {std::move(text), target.architecture()}};
  };
  const auto step_units = [&](GpuPlan& plan, const simt::Steps& steps) {
    for (const simt::Step& step : steps.list)
      plan.units.push_back(unit(step.function.name, simt::unit_text(step.function, step.config)));
  };
  GpuPlan hopper{"hopper", {}, ""};
  if (problem.pass == Pass::forward) {
    const sm90::ForwardPlan plan = sm90::plan_forward(problem, target);
    hopper.reason = plan.reason;
    if (plan.reason.empty())
      hopper.units = {unit("hopper_forward", sm90::forward_unit_text(plan.config)),
                      unit("hopper_restart", sm90::restart_unit_text())};
  } else if (const sm90::OnePassPlan one = sm90::plan_one_pass(problem, target); one.reason.empty()) {
    step_units(hopper, one.start);
    hopper.units.push_back(unit("hopper_prepare", sm90::prepare_unit_text(one.config, one.o, one.prepare_lanes)));
    hopper.units.push_back(unit("hopper_one_pass", sm90::one_pass_unit_text(one.config)));
    hopper.units.push_back(unit("hopper_finish", sm90::finish_unit_text(one.config, one.dQ)));
    step_units(hopper, one.end);
  } else {
    const sm90::BackwardPlan plan = sm90::plan_backward(problem, target);
    hopper.reason = plan.reason;
    step_units(hopper, plan.start);
    for (const sm90::BackwardPlan::Pass& pass : plan.passes)
      hopper.units.push_back(unit(owns_queries(pass.config) ? "hopper_backward_queries" : "hopper_backward_keys",
                                  sm90::backward_unit_text(pass.config)));
    step_units(hopper, plan.end);
  }
  plans.push_back(hopper);
  for (const simt::Rung& rung : simt::rungs()) {
    GpuPlan& plan = plans.emplace_back(GpuPlan{rung.name, {}, simt::common_refusal(problem)});
    if (!plan.reason.empty()) continue;
    const simt::Steps steps = rung.steps(problem, target);
    plan.reason = steps.reason;
    step_units(plan, steps);
  }
  return plans;
}

std::string text_of(HeadDims dims) { return dims.D == dims.Dv ? text(dims.D) : text(dims.D, "/", dims.Dv); }

Problem plain_problem(Pass pass, Type type, HeadDims dims) {
  Problem p{.pass = pass, .device = {DeviceType::cuda, 0}, .q_type = type, .kv_type = type, .o_type = type};
  p.B = 2, p.Nq = p.Nk = 4096, p.Hq = p.Hk = 8, p.D = dims.D, p.Dv = dims.Dv, p.lse = true;
  p.options.scale = 1.0 / std::sqrt(static_cast<double>(dims.D));
  if (pass == Pass::backward) p.d_o = p.dq = p.dk = p.dv = type;
  return p;
}

std::vector<cuda::NamedUnit> plain_units(const cuda::Target& target, const std::vector<Type>& types,
                                         const std::vector<HeadDims>& dims) {
  std::vector<cuda::NamedUnit> units;
  for (const HeadDims dim : dims)
    for (const Type type : types)
      for (const Pass pass : {Pass::forward, Pass::backward})
        for (const GpuPlan& plan : gpu_plans(plain_problem(pass, type, dim), target)) {
          if (!plan.reason.empty()) continue;
          units.insert(units.end(), plan.units.begin(), plan.units.end());
          break;
        }
  return units;
}

}  // namespace tessera::api
