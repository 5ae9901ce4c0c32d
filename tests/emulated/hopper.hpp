// SPDX-License-Identifier: Apache-2.0
// A case of the tables on the emulated machine: planned like a call, run by the Hopper forward kernel's own text,
// judged like a result of a GPU. Device code needs constants, so the tiles that may come out of the planner are a list.
// Included by tests/sm90/sm90_machine_test.cpp and sm90_parts_test.cpp, whose include paths put tests/emulated before
// src.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <string>

#include "core/check.hpp"
#include "cuda/device.hpp"
#include "gpu/arguments.hpp"
#include "sm90/plan.hpp"
#include "sm90/unit.hpp"
#include "tests/emulated/watch.hpp"
#include "tests/support/support.hpp"
// The machine comes first: device code needs it.
#include "sm90/kernel/forward.cuh"
#include "sm90/kernel/restart.cuh"

namespace tessera::sm90 {

alignas(1024) inline unsigned char memory[emulated::Machine::memory_bytes];

template <Config config>
void launch(const ForwardParams& p, int grid) {
  emulated::Machine& machine = emulated::Machine::here();
  machine.memory = memory;
  if (p.taken) machine.run(1, 1, 0, [&] { restart({p.taken}); });
  machine.shared_bytes = layout_of(config).bytes;
  machine.run(
      grid, threads_of(config), 128, [&] { forward<config>(p); }, p.taken != nullptr);
}

// Runs the kernel of a configuration, if it is one of the list.
template <Config... configs>
bool launch_one_of(const Config& wanted, const ForwardParams& p, int grid) {
  bool found = false;
  ((wanted == configs ? (found = true, launch<configs>(p, grid)) : void()), ...);
  return found;
}

// As sm90/steps.cpp does it, but the scale is the caller's own: these products lose nothing.
inline ForwardParams params_of(const Problem& problem, const Call& call, const ForwardPlan& plan, UInt32* taken) {
  const int keys = plan.config.block_keys;
  const bool copies_O = plan.config.stages_O && copyable(call.outputs.o);
  ForwardParams p{.q = emulated_map(call.inputs.q, 64),
                  .k = emulated_map(call.inputs.k, keys),
                  .v = emulated_map(call.inputs.v, keys),
                  .o = copies_O ? emulated_map(call.outputs.o, 64) : TensorMap{},
                  .call = gpu::forward_params(problem, call, problem.options.scale),
                  .Dv = Int32(problem.Dv),
                  .copies_O = copies_O,
                  .factor = float(problem.options.scale * std::numbers::log2e),
                  .tiles = Int32(plan.tiles),
                  .tiles_per_head = plan.tiles_per_head,
                  .section = plan.section,
                  .taken = taken};
  return p;
}

// The call of a built case, with `grid` blocks (0: as planned).
template <Config... configs>
void run_emulated(const Inputs& inputs, const Outputs& outputs, const Options& options, int grid) {
  Call call{};
  call.inputs = inputs, call.outputs = outputs, call.options = options;
  const Problem problem = check_forward(call.inputs, call.outputs, options, {});
  const ForwardPlan plan = plan_forward(problem, cuda::target_named("sm_90a"));
  ASSERT_EQ(plan.reason, "");
  const int blocks = grid > 0 ? grid : plan.grid;
  UInt32 taken = ~0u;
  emulated::Watch watch(call, &taken, sizeof(taken));
  emulated::Machine::here().tickets(&taken);
  const CarriedParams p{params_of(problem, call, plan, plan.varied && blocks < plan.tiles ? &taken : nullptr),
                        gpu::states_of(problem, call)};
  const std::string unit = forward_unit_text(plan.config);
  ASSERT_TRUE(launch_one_of<configs...>(plan.config, p, blocks))
      << "the planner's tile is not among those that this test has: " << unit.substr(unit.find("constexpr"));
}

inline void judge(const cases::CaseData& data, const cases::Expectation& expected, bool lse) {
  for (const cases::OutputReport& report :
       {cases::compare("o", data.o, expected.o), cases::compare_lse(data.lse, expected.lse)})
    EXPECT_TRUE(report.ok || (!lse && report.name == "lse")) << report.name << " " << report.detail;
  for (const cases::Buffer* buffer : data.buffers())
    EXPECT_TRUE(buffer->margins_intact()) << "a margin or gap was written";
}

}  // namespace tessera::sm90
