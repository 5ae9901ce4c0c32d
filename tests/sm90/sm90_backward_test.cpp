// SPDX-License-Identifier: Apache-2.0
// The Hopper backward kernels' own text, run on the host (tests/emulated): loader, consumers, barriers, layouts, masks
// and gradients, against float64. Delta, LSE and rows that no sequence uses, which the ladder's kernels prepare, are
// prepared here. Links tessera_cases; its include path puts tests/emulated before src.
#include <cmath>
#include <numbers>
#include <utility>

#include "core/check.hpp"
#include "cuda/device.hpp"
#include "gpu/arguments.hpp"
#include "hopper_backward_tiles.hpp"  // written while this is built
#include "sm90/plan.hpp"
#include "sm90/unit.hpp"
#include "tests/emulated/backward.hpp"
#include "tests/emulated/watch.hpp"
#include "tests/support/senseless.hpp"
// The machine comes first: device code needs it.
#include "sm90/kernel/backward.cuh"

namespace tessera::sm90 {

alignas(1024) unsigned char memory[emulated::Machine::memory_bytes];

namespace {

template <BackwardConfig config>
void launch(const BackwardParams& p, std::int64_t blocks) {
  emulated::Machine& machine = emulated::Machine::here();
  machine.memory = memory;
  machine.shared_bytes = layout_of(config).bytes;
  machine.run(int(blocks), threads_of(config), 128, [&] { backward<config>(p); });
}

// Runs the kernel of a configuration, if it is one of the list.
template <BackwardConfig... configs>
bool launch_one_of(const BackwardConfig& wanted, const BackwardParams& p, std::int64_t blocks) {
  bool found = false;
  ((wanted == configs ? (found = true, launch<configs>(p, blocks)) : void()), ...);
  return found;
}

// What the ladder's kernels do before: delta, and LSE in units of log2(e), +inf for rows that see nothing.
void prepare(const cases::CaseData& data, const gpu::BackwardParams& p) {
  const std::int64_t Hq = data.spec.Hq, Dv = data.spec.dim_v();
  for (const cases::Sequence& s : data.sequences)
    for (std::int64_t h = 0; h < Hq; ++h)
      for (std::int64_t i = 0; i < s.Nq; ++i) {
        const std::int64_t number = s.lse_first + h * s.lse_head + i, at = h * p.row_head + s.row_q + i;
        const double lse = data.lse.get(number);
        const bool blind = lse == -INFINITY;
        double sum = 0;
        for (std::int64_t e = ((s.row_q + i) * Hq + h) * Dv, end = e + Dv; e < end && !blind; ++e)
          sum += data.o.get(e) * data.d_o.get(e);
        if (data.d_lse && !blind) sum -= data.d_lse.get(number);
        p.delta[at] = float(sum), p.lse2[at] = blind ? INFINITY : float(lse * std::numbers::log2e);
      }
}

// As sm90/steps.cpp does it, but the scale is the caller's own: these products lose nothing.
void run_backward(cases::CaseData& data) {
  Call call = emulated::backward_call(data);
  Problem problem = check_backward(call.inputs, call.saved, call.gradients, call.options, {});
  const BackwardPlan plan = plan_backward(problem, cuda::target_named("sm_90a"));
  ASSERT_EQ(plan.reason, "");
  std::vector<float> workspace(static_cast<std::size_t>(gpu::workspace_bytes(problem, {})) / sizeof(float), NAN);
  call.execution.workspace = workspace.data();
  const gpu::BackwardParams params = gpu::backward_params(problem, call, {}, problem.options.scale);
  prepare(data, params);
  emulated::clear_unused(data);
  const emulated::Watch watch(call, workspace.data(), workspace.size() * sizeof(float));
  for (const auto& [c, blocks] : plan.passes) {
    const bool queries = owns_queries(c);
    const BackwardParams p{.row_QK = emulated_map(queries ? call.inputs.q : call.inputs.k, 64),
                           .row_VO = emulated_map(queries ? call.saved.d_o : call.inputs.v, 64),
                           .column_QK = emulated_map(queries ? call.inputs.k : call.inputs.q, c.block_columns),
                           .column_VO = emulated_map(queries ? call.inputs.v : call.saved.d_o, c.block_columns),
                           .call = params,
                           .D = Int32(problem.D),
                           .Dv = Int32(problem.Dv),
                           .factor = float(problem.options.scale * std::numbers::log2e)};
    const std::string unit = backward_unit_text(c);
    const bool found = launch_one_of<HOPPER_BACKWARD_TILES>(c, p, blocks);
    ASSERT_TRUE(found) << "the planner's tile is not among those that this test has: "
                       << unit.substr(unit.find("constexpr"));
  }
}

void run(cases::CaseData& data) {
  forward(data.inputs(), data.outputs(), data.options(), {});
  run_backward(data);
}

void check_group(const std::string& group) {
  int ran = 0;
  for (const emulated::BackwardCase& c : emulated::backward_cases()) {
    if (c.spec.name != group) continue;
    emulated::check(c, run);
    if (testing::Test::HasFailure()) return;
    ++ran;
  }
  EXPECT_GT(ran, 0) << "there is no such group";
}

TEST(HopperBackward, Full) { check_group("Full"); }
TEST(HopperBackward, OneToManyTiles) { check_group("OneToManyTiles"); }
TEST(HopperBackward, HeadDimsBetweenTiles) { check_group("HeadDimsBetweenTiles"); }
TEST(HopperBackward, GroupsOfHeads) { check_group("GroupsOfHeads"); }
TEST(HopperBackward, Causal) { check_group("Causal"); }
TEST(HopperBackward, QueriesThatSeeNothing) { check_group("QueriesThatSeeNothing"); }
TEST(HopperBackward, Windows) { check_group("Windows"); }
TEST(HopperBackward, PackedSequences) { check_group("PackedSequences"); }
TEST(HopperBackward, Fronts) { check_group("Fronts"); }
TEST(HopperBackward, UsedLengths) { check_group("UsedLengths"); }
TEST(HopperBackward, Layouts) { check_group("Layouts"); }
TEST(HopperBackward, SinksAndLseGradient) { check_group("SinksAndLseGradient"); }
TEST(HopperBackward, WideGradients) { check_group("WideGradients"); }
TEST(HopperBackward, Accumulation) { check_group("Accumulation"); }
TEST(HopperBackward, SomeGradients) { check_group("SomeGradients"); }
TEST(HopperBackward, ExtremeNumbers) { check_group("ExtremeNumbers"); }
TEST(HopperBackward, ScaleNotPositive) { check_group("ScaleNotPositive"); }
TEST(HopperBackward, Softcap) { check_group("Softcap"); }
TEST(HopperBackward, Alibi) { check_group("Alibi"); }
TEST(HopperBackward, Bias) { check_group("Bias"); }
TEST(HopperBackward, Mask) { check_group("Mask"); }
TEST(HopperBackward, Dropout) { check_group("Dropout"); }
TEST(HopperBackward, Everything) { check_group("Everything"); }

TEST(HopperBackward, SenselessLengths) {
  for (const std::int64_t D : {64, 256})
    test::check_senseless_lengths(test::senseless_base(D, Type::bf16, D == 64), true, run_backward);
}

}  // namespace
}  // namespace tessera::sm90
