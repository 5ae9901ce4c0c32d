// SPDX-License-Identifier: Apache-2.0
// The launches of a plan on the emulated machine, one after another, as a GPU's stream runs them. Included by the tests
// that run kernels' own text by way of their plans (tests/ladder, tests/mma); see tests/emulated/machine.hpp.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "gpu/step.hpp"
#include "tests/emulated/watch.hpp"

namespace tessera::emulated {

using UnitFunctions = std::map<std::string, void (*)(const void* params)>;

// As GpuPlan::run of gpu/backend.cpp. `memory`: the block's, where the kernels' text looks for it.
template <std::size_t memory_bytes>
void run_steps(const gpu::Steps& steps, const Problem& problem, Call call, const UnitFunctions& units,
               unsigned char (&memory)[memory_bytes]) {
  const auto chunks = [](std::int64_t bytes) { return static_cast<std::size_t>(bytes) / sizeof(float4) + 1; };
  const std::size_t common_chunks = chunks(gpu::workspace_bytes(problem, steps.accumulators));
  std::vector<float4> workspace(common_chunks + chunks(steps.own_bytes), {NAN, NAN, NAN, NAN});
  call.execution.workspace = workspace.data();
  gpu::PassParams common;
  if (problem.pass == Pass::forward) common = gpu::forward_params(problem, call, steps.score_scale);
  if (problem.pass == Pass::backward)
    common = gpu::backward_params(problem, call, steps.accumulators, steps.score_scale);
  const gpu::Given given{call, common, reinterpret_cast<std::byte*>(workspace.data() + common_chunks)};
  const Watch watch(call, workspace.data(), workspace.size() * sizeof(float4));
  Machine& machine = Machine::here();
  machine.memory = memory;
  for (const gpu::Step& step : steps.list) {
    const auto unit = units.find(step.unit);
    ASSERT_NE(unit, units.end()) << "this test has no " << step.unit;
    const void* params = std::visit([](const auto& p) -> const void* { return &p; }, common);
    alignas(64) std::byte own[4096];
    if (step.parameter_bytes > 0) step.write_parameters(given, own), params = own;
    ASSERT_LE(step.shared_bytes, static_cast<int>(memory_bytes));
    machine.shared_bytes = static_cast<std::size_t>(step.shared_bytes);
    machine.run(
        static_cast<int>(step.blocks), step.threads, 0, [&] { unit->second(params); }, step.programmatic);
  }
}

}  // namespace tessera::emulated
