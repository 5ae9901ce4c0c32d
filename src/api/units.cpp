// SPDX-License-Identifier: Apache-2.0
// Enumerates the units of GPU plans; see units.hpp.
#include "api/units.hpp"

#include <algorithm>
#include <cmath>

#include "api/kernels.hpp"
#include "core/failure.hpp"
#include "core/tensor.hpp"

namespace tessera::api {

std::vector<GpuPlan> gpu_plans(const Problem& problem, const cuda::Target& target) {
  const std::string variant = text(name_of(problem.q_type), " D=", text_of(HeadDims{problem.D, problem.Dv}));
  std::vector<GpuPlan> plans;
  for (const gpu::Algorithm& algorithm : gpu_algorithms()) {
    const gpu::Steps steps = algorithm.plan(problem, target);
    GpuPlan& plan =
        plans.emplace_back(GpuPlan{algorithm.name, algorithm.family, {}, steps.reason, algorithm.by_name != nullptr});
    if (!steps.reason.empty()) continue;
    for (const gpu::Step& step : steps.list)
      plan.units.push_back({step.name, variant, {step.unit, target.architecture()}});
  }
  return plans;
}

std::string text_of(HeadDims dims) { return dims.D == dims.Dv ? text(dims.D) : text(dims.D, "/", dims.Dv); }

Problem plain_problem(Pass pass, Type type, HeadDims dims) {
  Problem p{
      .pass = pass, .device = {DeviceType::cuda, 0}, .q_type = type, .k_type = type, .v_type = type, .o_type = type};
  p.B = 2, p.Nq = p.Nk = 4096, p.Hq = p.Hk = 8, p.D = dims.D, p.Dv = dims.Dv, p.lse = true;
  p.options.scale = 1.0 / std::sqrt(static_cast<double>(dims.D));
  if (pass == Pass::backward) p.d_o = p.dq = p.dk = p.dv = type;
  return p;
}

std::vector<cuda::NamedUnit> plain_units(const cuda::Target& target, const std::vector<Type>& types,
                                         const std::vector<HeadDims>& dims) {
  std::vector<cuda::NamedUnit> units;
  const auto add = [&](const Problem& problem) {
    for (const GpuPlan& plan : gpu_plans(problem, target)) {
      if (!plan.reason.empty() || plan.by_name) continue;
      for (const cuda::NamedUnit& unit : plan.units)
        if (std::ranges::none_of(units, [&](const auto& u) { return u.unit.text == unit.unit.text; }))
          units.push_back(unit);
      return;
    }
  };
  for (const HeadDims dim : dims)
    for (const Type type : types)
      for (const Pass pass : {Pass::forward, Pass::backward})
        for (const bool causal : {false, true}) {
          Problem problem = plain_problem(pass, type, dim);
          problem.options.causal = causal;
          add(problem);
        }
  return units;
}

}  // namespace tessera::api
