// SPDX-License-Identifier: Apache-2.0
// The problem that the pictures of the GPU kernels show, and the ladder's real plans for it on an H100 or H200.
// Included by tools/pictures/*.cpp only.
#pragma once

#include <stdexcept>

#include "api/units.hpp"
#include "ladder/ladder.hpp"

namespace tessera::pictures {

inline constexpr const char* drawn_architecture = "sm_90a";

// One sequence, two heads of 64 dims, f32, causal.
inline Problem drawn_problem(Pass pass, std::int64_t N = 1024) {
  Problem p = api::plain_problem(pass, Type::f32, {64, 64});
  p.B = 1, p.Hq = p.Hk = 2, p.Nq = p.Nk = N, p.alignment = 16;
  p.options.causal = true;
  return p;
}

inline gpu::Steps steps_of(const std::string& rung, const Problem& problem) {
  for (const gpu::Algorithm& one : ladder::algorithms())
    if (rung == one.name) return one.plan(problem, cuda::target_named(drawn_architecture));
  throw std::runtime_error("there is no rung " + rung);
}

inline gpu::Step step_of(const gpu::Steps& steps, const std::string& function) {
  for (const gpu::Step& step : steps.list)
    if (function == step.name) return step;
  throw std::runtime_error("the plan has no " + function + ": " + steps.reason);
}

// A number of a step's configuration, as its unit says it: ".block_rows = 128".
inline int setting_of(const gpu::Step& step, const std::string& name) {
  const std::string before = "." + name + " = ";
  const std::size_t at = step.unit.find(before);
  if (at == std::string::npos) throw std::runtime_error(step.name + " has no " + name);
  return std::stoi(step.unit.substr(at + before.size()));
}

// The question that the kernels of such a problem are asked, without memory.
inline gpu::Question question_of(const Problem& p) {
  gpu::Question x{};
  x.B = Int32(p.B), x.Hq = Int32(p.Hq), x.Hk = Int32(p.Hk), x.Nq = p.Nq, x.Nk = p.Nk;
  x.causal = p.options.causal, x.alignment = Int32(p.options.alignment);
  x.window_left = p.options.window_left, x.window_right = p.options.window_right;
  return x;
}

}  // namespace tessera::pictures
