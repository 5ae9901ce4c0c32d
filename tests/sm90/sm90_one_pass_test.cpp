// SPDX-License-Identifier: Apache-2.0
// The Hopper one-pass backward kernel's own text, run on the host (tests/emulated) with what comes before and after it,
// against float64. Links tessera_cases; its include path puts tests/emulated before src.
#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>
#include <random>
#include <utility>

#include "core/check.hpp"
#include "cuda/device.hpp"
#include "gpu/arguments.hpp"
#include "sm90/one_pass_plan.hpp"
#include "tests/emulated/backward.hpp"
#include "tests/emulated/turns.hpp"
#include "tests/emulated/watch.hpp"
#include "tests/support/senseless.hpp"
// The machine comes first: device code needs it.
#include "sm90/kernel/finish.cuh"
#include "sm90/kernel/one_pass.cuh"
#include "sm90/kernel/prepare.cuh"

namespace tessera::sm90 {

alignas(1024) unsigned char memory[emulated::Machine::memory_bytes];

namespace {

using enum Element;

void run_blocks(std::int64_t blocks, int threads, int producers, bool programmatic,
                const std::function<void()>& kernel) {
  emulated::Machine& machine = emulated::Machine::here();
  machine.memory = memory;
  machine.run(int(blocks), threads, producers, kernel, programmatic);
}

template <Element element, Element gradient, int D>
bool run_if(const OnePassPlan& plan, const PrepareParams& before, const OnePassParams& p, const FinishParams& after) {
  const auto run = [&]<bool ordered>(std::bool_constant<ordered>) {
    constexpr OnePassConfig config{.D = D,
                                   .Dv = D,
                                   .element = element,
                                   .dK = gradient,
                                   .dV = gradient,
                                   .block_queries = D == 64 ? 128 : 64,
                                   .ordered = ordered};
    if (!(config == plan.config) || plan.dQ != gradient || plan.o != element) return false;
    const int lanes = plan.prepare_lanes;
    run_blocks(plan.query_blocks, prepare_threads, 0, false, [&] {
      if (lanes == 16) prepare<config, element, 16>(before);
      if (lanes == 8) prepare<config, element, 8>(before);
      if (lanes == 4) prepare<config, element, 4>(before);
    });
    emulated::Machine::here().shared_bytes = layout_of(config).bytes;
    run_blocks(plan.grid, one_pass_threads, 128, true, [&] { one_pass<config>(p); });
    run_blocks(plan.query_blocks, 128 * parts_of(config), 0, true, [&] { finish<config, gradient>(after); });
    return true;
  };
  return run(std::true_type{}) || run(std::false_type{});
}

// As sm90/steps.cpp has it run, but the scale is the caller's own: these products lose nothing.
void run_backward(cases::CaseData& data) {
  Call call = emulated::backward_call(data);
  const Problem problem = check_backward(call.inputs, call.saved, call.gradients, call.options, {});
  const OnePassPlan plan = plan_one_pass(problem, cuda::target_named("sm_90a"));
  ASSERT_EQ(plan.reason, "");
  struct alignas(16) Chunk {
    float numbers[4] = {NAN, NAN, NAN, NAN};
  };
  const auto common = std::size_t(round_up(gpu::workspace_bytes(problem, {}), sizeof(Chunk))) / sizeof(Chunk);
  std::vector<Chunk> workspace(common + std::size_t(plan.own_bytes) / sizeof(Chunk));
  char* const own = reinterpret_cast<char*>(workspace.data() + common);
  call.execution.workspace = workspace.data();
  const gpu::BackwardParams params = gpu::backward_params(problem, call, {}, problem.options.scale);
  emulated::clear_unused(data);
  const OnePassMemory memory = memory_of(plan, own);
  const OnePassPlan::Part zeros = plan.zeros();
  const PrepareParams before{params, memory, plan.order, Int32(problem.Dv), own + zeros.at, zeros.bytes / 16};
  const OnePassParams p{.q = emulated_map(call.inputs.q, plan.config.block_queries),
                        .k = emulated_map(call.inputs.k, 64),
                        .v = emulated_map(call.inputs.v, 64),
                        .d_o = emulated_map(call.saved.d_o, plan.config.block_queries),
                        .call = params,
                        .memory = memory,
                        .D = Int32(problem.D),
                        .Dv = Int32(problem.Dv),
                        .factor = float(problem.options.scale * std::numbers::log2e)};
  const FinishParams after{params, memory, Int32(problem.D)};
  const emulated::Watch watch(call, workspace.data(), workspace.size() * sizeof(Chunk));
  emulated::Machine::here().tickets(memory.taken);
  const bool found = run_if<bf16, bf16, 64>(plan, before, p, after) ||
                     run_if<bf16, bf16, 128>(plan, before, p, after) || run_if<f16, f16, 64>(plan, before, p, after) ||
                     run_if<f16, f16, 128>(plan, before, p, after) || run_if<bf16, f32, 64>(plan, before, p, after) ||
                     run_if<bf16, f32, 128>(plan, before, p, after);
  ASSERT_TRUE(found) << "this test has no kernel for the types of the case";
}

void run(cases::CaseData& data) {
  forward(data.inputs(), data.outputs(), data.options(), {});
  run_backward(data);
}

OnePassPlan plan_of(const cases::Case& spec) {
  cases::CaseData data = cases::build(spec);
  const Call call = emulated::backward_call(data);
  const Problem problem = check_backward(call.inputs, call.saved, call.gradients, call.options, {});
  return plan_one_pass(problem, cuda::target_named("sm_90a"));
}

// The group's cases that one pass takes; dQ summed in order and, where it may make a difference, not.
void check_group(const std::string& group, bool in_any_order = false) {
  int ran = 0;
  for (emulated::BackwardCase c : emulated::backward_cases()) {
    if (c.spec.name != group || !plan_of(c.spec).reason.empty()) continue;
    emulated::check(c, run);
    c.spec.options.deterministic = false;
    if (in_any_order) emulated::check(c, run);
    if (testing::Test::HasFailure()) return;
    ++ran;
  }
  EXPECT_GT(ran, 0) << "there is no such group";
}

TEST(HopperOnePass, Full) { check_group("Full", true); }
TEST(HopperOnePass, OneToManyTiles) { check_group("OneToManyTiles"); }
TEST(HopperOnePass, HeadDimsBetweenTiles) { check_group("HeadDimsBetweenTiles"); }
TEST(HopperOnePass, GroupsOfHeads) { check_group("GroupsOfHeads", true); }
TEST(HopperOnePass, Causal) { check_group("Causal", true); }
TEST(HopperOnePass, QueriesThatSeeNothing) { check_group("QueriesThatSeeNothing"); }
TEST(HopperOnePass, Windows) { check_group("Windows", true); }
TEST(HopperOnePass, PackedSequences) { check_group("PackedSequences"); }
TEST(HopperOnePass, Fronts) { check_group("Fronts", true); }
TEST(HopperOnePass, UsedLengths) { check_group("UsedLengths", true); }
TEST(HopperOnePass, Layouts) { check_group("Layouts"); }
TEST(HopperOnePass, SinksAndLseGradient) { check_group("SinksAndLseGradient"); }
TEST(HopperOnePass, WideGradients) { check_group("WideGradients"); }
TEST(HopperOnePass, Accumulation) { check_group("Accumulation"); }

// LSE so low that exp2(0 - LSE) is inf, in a tile that lacks keys but no queries.
TEST(HopperOnePass, ExtremeNumbers) {
  check_group("ExtremeNumbers");
  for (const Type type : {Type::bf16, Type::f16})
    emulated::check({{.Nq = 128, .Nk = 200, .D = 64, .type = type, .distribution = cases::Distribution::cold}, false},
                    run);
}

TEST(HopperOnePass, SenselessLengths) {
  for (const std::int64_t D : {64, 128})
    test::check_senseless_lengths(test::senseless_base(D, Type::bf16, D == 64), true, run_backward);
}

// --- the order of additions to a tile's sum, without the arithmetic

constexpr OnePassConfig turns_config{.D = 128, .Dv = 128};

// Any that plans might choose.
WorkOrder random_order(const gpu::Question& x, std::mt19937& random) {
  WorkOrder order{};
  order.heads = x.cu_seqlens_k.data ? x.Hk : x.B * x.Hk;
  order.blocks = Int32(gpu::block_count(x.cu_seqlens_k.data, x.Nk, one_pass_keys, x.B) * x.Hk / order.heads);
  order.together = Int32(1 + random() % UInt32(order.heads));
  order.stagger = random() % 2 ? order.blocks : Int32(1 + random() % UInt32(order.blocks));
  return order;
}

// The order's additions, with `resident` blocks at a time; see emulated/turns.hpp.
int run_turns(const gpu::Question& x, const WorkOrder& order, int resident, std::mt19937& random) {
  OnePassMemory memory{};
  memory.tiles_per_head = Int32(gpu::block_count(x.cu_seqlens_q.data, x.Nq, turns_config.block_queries, x.B));
  const auto visits_of = [&](Int64 number) {
    OnePassWork<turns_config> w{};
    w.find(x, order, number);
    std::vector<emulated::Visit> visits;
    if (!w.has_keys()) return visits;
    for (TileWalk<turns_config> at(w); at.has_more(); at.advance())
      visits.push_back({at.number(memory, w), w.turn_at(at.tile)});
    return visits;
  };
  const Int64 blocks = x.Hk * gpu::block_count(x.cu_seqlens_k.data, x.Nk, one_pass_keys, x.B);
  return emulated::run_turns(blocks, visits_of, resident, false, random);
}

TEST(HopperOnePass, EveryBlockIsTakenOnceAndThoseOfAHeadInOrder) {
  std::mt19937 random(12);
  int padded = 0, overlapping = 0;
  for (int round = 0; round < 300; ++round) {
    std::vector<Int32> q, k;
    gpu::Question x = emulated::random_question(random, q, k);
    if (!x.cu_seqlens_k.data) x.B = Int32(1 + random() % 40);
    const WorkOrder order = random_order(x, random);
    std::map<std::pair<Int32, Int32>, Int32> next;  // key of a sequence's head
    Int64 keys = 0;
    for (Int64 n = 0; n < order.heads * Int64(order.blocks); ++n) {
      OnePassWork<turns_config> w{};
      w.find(x, order, n);
      if (!w.has_keys()) continue;
      Int32& at = next[{w.b, w.kv}];
      ASSERT_EQ(w.first, at) << "sequence " << w.b << ", head " << w.kv;
      at += one_pass_keys, keys += lesser(Int64(one_pass_keys), w.keys - w.first);
    }
    if (x.cu_seqlens_k.data) continue;
    EXPECT_EQ(keys, x.B * x.Hk * x.Nk);
    ++padded, overlapping += order.stagger < order.blocks;
  }
  EXPECT_GT(padded, 50);
  EXPECT_GT(overlapping, 20);
}

TEST(HopperOnePass, TurnsComeForAnyNumberOfResidentBlocks) {
  std::mt19937 random(11);
  int waits = 0;
  for (int round = 0; round < 400; ++round) {
    std::vector<Int32> q, k;
    const gpu::Question x = emulated::random_question(random, q, k);
    for (const int resident : {1, 2, 3, 8, 1000}) {
      const int waited = run_turns(x, random_order(x, random), resident, random);
      ASSERT_GE(waited, 0) << "Nq " << x.Nq << " Nk " << x.Nk << " resident " << resident;
      ASSERT_TRUE(resident > 1 || waited == 0);
      waits += waited;
    }
  }
  EXPECT_GT(waits, 1000);  // else the order was never in question
}

}  // namespace
}  // namespace tessera::sm90
