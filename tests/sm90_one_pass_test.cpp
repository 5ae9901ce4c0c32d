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
#include "simt/arguments.hpp"
#include "sm90/one_pass_plan.hpp"
#include "tests/emulated/machine.hpp"
#include "tests/support.hpp"
// The machine comes first: device text needs it.
#include "sm90/kernel/finish.cuh"
#include "sm90/kernel/one_pass.cuh"
#include "sm90/kernel/prepare.cuh"

namespace tessera::sm90 {

alignas(1024) unsigned char memory[emulated::Machine::memory_bytes];

namespace {

using enum Element;

void run_blocks(std::int64_t blocks, int threads, const std::function<void()>& kernel) {
  emulated::Machine& machine = emulated::Machine::here();
  machine.memory = memory;
  machine.run(int(blocks), threads, kernel);
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
    emulated_element = element;
    const int lanes = plan.prepare_lanes;
    run_blocks(plan.prepare_blocks, prepare_threads, [&] {
      if (lanes == 16) prepare<element, element, 16>(before);
      if (lanes == 8) prepare<element, element, 8>(before);
      if (lanes == 4) prepare<element, element, 4>(before);
    });
    run_blocks(plan.blocks, one_pass_threads, [&] { one_pass<config>(p); });
    run_blocks(plan.finish_blocks, 128 * parts_of(config), [&] { finish<config, gradient>(after); });
    return true;
  };
  return run(std::true_type{}) || run(std::false_type{});
}

// Rows of a gradient that no sequence uses become 0, which the ladder's kernel does.
void clear(cases::Buffer& gradient, const cases::CaseData& data, bool keys) {
  if (data.spec.options.accumulate) return;
  const std::int64_t width = (keys ? data.spec.Hk : data.spec.Hq) * gradient.tensor().shape[gradient.tensor().ndim - 1];
  std::vector<bool> used(std::size_t(gradient.elements() / width));
  for (const cases::Sequence& s : data.sequences)
    for (std::int64_t i = 0; i < (keys ? s.Nk : s.Nq); ++i) used[std::size_t((keys ? s.row_k : s.row_q) + i)] = true;
  for (std::int64_t e = 0; e < gradient.elements(); ++e)
    if (!used[std::size_t(e / width)]) gradient.set(e, 0);
}

// As the plan of sm90/one_pass_backend.cpp runs it, but the scale is the caller's own: these products lose nothing.
void run(cases::CaseData& data) {
  forward(data.inputs(), data.outputs(), data.options(), {});
  Call call{};
  call.inputs = data.inputs(), call.saved = data.saved(), call.gradients = data.gradients();
  call.options = data.options();
  const Problem problem = check_backward(call.inputs, call.saved, call.gradients, call.options, {});
  const OnePassPlan plan = plan_one_pass(problem, cuda::target_named("sm_90a"));
  ASSERT_EQ(plan.reason, "");
  std::vector<float> workspace(std::size_t(plan.workspace_bytes) / sizeof(float) + 32, NAN);
  void* aligned = workspace.data();
  std::size_t room = workspace.size() * sizeof(float);
  std::align(128, std::size_t(plan.workspace_bytes), aligned, room);
  auto* base = static_cast<char*>(aligned);
  call.execution.workspace = aligned;
  const simt::BackwardParams params = simt::backward_params(problem, call, {});
  clear(data.dq, data, false), clear(data.dk, data, true), clear(data.dv, data, true);
  auto* sums = reinterpret_cast<float*>(base + plan.sums_at);
  auto* counts = reinterpret_cast<UInt32*>(base + plan.counts_at);
  const Zeros zeros = zeros_of(plan);
  const PrepareParams before{params, Int32(problem.Dv), base + zeros.at, zeros.bytes / 16};
  const OnePassParams p{.q = emulated_map(call.inputs.q, plan.config.block_queries),
                        .k = emulated_map(call.inputs.k, 64),
                        .v = emulated_map(call.inputs.v, 64),
                        .d_o = emulated_map(call.saved.d_o, plan.config.block_queries),
                        .call = params,
                        .D = Int32(problem.D),
                        .Dv = Int32(problem.Dv),
                        .factor = float(problem.options.scale * std::numbers::log2e),
                        .sums = sums,
                        .counts = counts + 1,
                        .taken = counts,
                        .tiles_per_head = Int32(plan.tiles_per_head)};
  const FinishParams after{params, sums, plan.tiles_per_head, Int32(problem.D)};
  const bool found = run_if<bf16, bf16, 64>(plan, before, p, after) ||
                     run_if<bf16, bf16, 128>(plan, before, p, after) || run_if<f16, f16, 64>(plan, before, p, after) ||
                     run_if<f16, f16, 128>(plan, before, p, after) || run_if<bf16, f32, 64>(plan, before, p, after) ||
                     run_if<bf16, f32, 128>(plan, before, p, after);
  ASSERT_TRUE(found) << "this test has no kernel for the types of the case";
}

void poison_blind_queries(cases::CaseData& data, const cases::Expectation& expected) {
  const std::int64_t Hq = data.spec.Hq;
  for (const cases::Sequence& s : data.sequences)
    for (std::int64_t i = 0; i < s.Nq; ++i)
      for (std::int64_t h = 0; h < Hq; ++h) {
        if (expected.lse.exact[std::size_t(s.lse_first + h * s.lse_head + i)] != -INFINITY) continue;
        for (cases::Buffer* buffer : {&data.q, &data.d_o}) {
          const std::int64_t width = buffer == &data.q ? data.spec.D : data.spec.dim_v();
          for (std::int64_t d = 0; d < width; ++d) buffer->set(((s.row_q + i) * Hq + h) * width + d, NAN);
        }
      }
}

// In bf16 and with heads that share one of K and V, unless the case says otherwise; dQ summed in order and not.
void check(cases::Case c, bool poison = false) {
  if (c.type == Type::f32) c.type = Type::bf16;
  if (c.Hq <= 2) c.Hk = 1;
  for (const bool deterministic : {true, false}) {
    c.options.deterministic = deterministic;
    SCOPED_TRACE(cases::describe(c));
    cases::CaseData data = cases::build(c);
    const cases::Expectation expected = cases::expect(data);
    if (poison) poison_blind_queries(data, expected);
    run(data);
    for (const cases::OutputReport& report :
         {cases::compare("dq", data.dq, expected.dq), cases::compare("dk", data.dk, expected.dk),
          cases::compare("dv", data.dv, expected.dv)})
      EXPECT_TRUE(report.ok) << report.name << " " << report.detail;
    for (const cases::Buffer* buffer : std::as_const(data).buffers())
      EXPECT_TRUE(buffer->margins_intact()) << "a margin or gap was written";
  }
}

TEST(HopperOnePass, Full) {
  check({.Nq = 130, .Nk = 250, .D = 64});
  check({.Nq = 200, .Nk = 150, .D = 128});
  check({.Nq = 65, .Nk = 200, .Hq = 1, .D = 64, .type = Type::f16});
  check({.Nq = 65, .Nk = 100, .Hq = 1, .D = 128, .type = Type::f16});
}

TEST(HopperOnePass, OneToManyTiles) {
  for (const std::int64_t N : {1, 64, 65, 129, 193}) {
    check({.Nq = 3, .Nk = N, .Hq = 1, .Hk = 1});
    check({.Nq = N, .Nk = 3, .Hq = 1, .Hk = 1, .D = 128});
  }
  check({.Nq = 500, .Nk = 3, .Hq = 1, .Hk = 1, .D = 128});
  check({.Nq = 3, .Nk = 500, .Hq = 1, .Hk = 1, .D = 64});
}

TEST(HopperOnePass, HeadDimsBetweenTiles) {
  check({.Nq = 70, .Nk = 100, .D = 40, .Dv = 24});
  check({.Nq = 70, .Nk = 100, .D = 80, .Dv = 72, .options = {.causal = true}});
  check({.Nq = 70, .Nk = 100, .D = 64, .Dv = 128});
}

TEST(HopperOnePass, GroupsOfHeads) {
  check({.B = 2, .Nq = 70, .Nk = 140, .Hq = 6, .Hk = 2, .D = 64, .options = {.causal = true}});
  check({.B = 2, .Nq = 140, .Nk = 70, .Hq = 3, .Hk = 1, .D = 128});
  check({.B = 2, .Nq = 70, .Nk = 70, .Hq = 3, .Hk = 3, .D = 128});
}

TEST(HopperOnePass, Causal) {
  check({.Nq = 300, .Nk = 300, .D = 64, .options = {.causal = true}});
  check({.Nq = 150, .Nk = 230, .D = 128, .options = {.causal = true}});
  check({.Nq = 140, .Nk = 300, .D = 128, .options = {.causal = true, .alignment = Alignment::top_left}});
}

TEST(HopperOnePass, QueriesThatSeeNothing) {
  for (const bool poison : {false, true}) {
    check({.Nq = 300, .Nk = 100, .D = 128, .options = {.causal = true}}, poison);
    check({.Nq = 300, .Nk = 40, .D = 64, .options = {.causal = true}}, poison);
  }
}

TEST(HopperOnePass, Windows) {
  check({.Nq = 300, .Nk = 300, .D = 64, .options = {.window_left = 100, .window_right = 20}});
  check({.Nq = 450, .Nk = 600, .D = 64, .options = {.causal = true, .window_left = 10}});
  check({.Nq = 130, .Nk = 400, .D = 128, .options = {.window_left = 0, .window_right = 0}});
}

TEST(HopperOnePass, PackedSequences) {
  for (const std::int64_t D : {64, 128})
    for (const bool causal : {false, true})
      check({.D = D,
             .options = {.causal = causal},
             .packed_q = {70, 0, 160, 70, 10},
             .packed_k = {130, 10, 160, 120, 0},
             .tail_q = 5,
             .tail_k = 9});
}

// With NaN behind the used lengths, in memory that belongs to the tensors.
TEST(HopperOnePass, UsedLengths) {
  check({.B = 3, .Nq = 150, .Nk = 260, .D = 64, .used_q = {150, 20, 64}, .used_k = {100, 260, 129}});
  check({.D = 128,
         .options = {.causal = true},
         .packed_q = {70, 160, 70},
         .packed_k = {130, 170, 120},
         .used_q = {0, 130, 65},
         .used_k = {100, 3, 119}});
}

TEST(HopperOnePass, Layouts) {
  for (const cases::Style style : {cases::Style::heads_first, cases::Style::broadcast})
    for (const std::int64_t D : {64, 128})
      check({.B = 2, .Nq = 130, .Nk = 100, .Hq = 4, .Hk = 2, .D = D, .options = {.causal = true}, .style = style});
}

TEST(HopperOnePass, SinksAndLseGradient) {
  check({.Nq = 64, .Nk = 200, .D = 128, .sinks = cases::Sinks::finite, .dlse = true});
  check({.Nq = 200, .Nk = 100, .D = 64, .options = {.causal = true}, .sinks = cases::Sinks::some_infinite});
}

TEST(HopperOnePass, WideGradientsAndAccumulation) {
  check({.B = 2, .Nq = 130, .Nk = 150, .D = 64, .used_q = {130, 70}, .f32_grads = true});
  check({.Nq = 70, .Nk = 100, .D = 104, .Dv = 88, .f32_grads = true});
  check({.Nq = 200, .Nk = 100, .D = 120, .options = {.causal = true, .accumulate = true}, .f32_grads = true});
}

// LSE so low that exp2(0 - LSE) is inf, in a tile that is partly empty.
TEST(HopperOnePass, ExtremeNumbers) {
  for (const auto distribution : {cases::Distribution::cold, cases::Distribution::outlier, cases::Distribution::huge})
    for (const Type type : {Type::bf16, Type::f16})
      check({.Nq = 128, .Nk = 200, .D = 64, .type = type, .distribution = distribution});
}

// --- the order of additions to a tile's sum, without the arithmetic

constexpr OnePassConfig turns_config{.D = 128, .Dv = 128};

// Lengths and masks of all kinds; memory for cu_seqlens stays with the caller.
simt::Question random_question(std::mt19937& random, std::vector<Int32>& q, std::vector<Int32>& k) {
  const auto between = [&](Int64 least, Int64 most) { return least + Int64(random() % UInt64(most - least + 1)); };
  simt::Question x{};
  x.B = Int32(between(1, 3)), x.Hk = Int32(between(1, 2)), x.Hq = x.Hk * Int32(between(1, 2));
  x.Nq = between(1, 700), x.Nk = between(1, 900);
  x.window_left = x.window_right = -1;
  if (random() % 2) x.causal = 1;
  if (random() % 3 == 0) x.window_left = between(0, 300);
  if (random() % 3 == 0 && !x.causal) x.window_right = between(0, 300);
  x.alignment = Int32(random() % 2);
  if (random() % 2) {
    q.assign(std::size_t(x.B) + 1, 0), k = q;
    for (std::size_t b = 1; b < q.size(); ++b)
      q[b] = q[b - 1] + Int32(between(0, x.Nq)), k[b] = k[b - 1] + Int32(between(0, x.Nk));
    x.Nq = q.back(), x.Nk = k.back();
    x.cu_seqlens_q = {q.data(), 1}, x.cu_seqlens_k = {k.data(), 1};
  }
  return x;
}

// Blocks take work in order, `resident` of them are there at a time, and any of those may go on. Returns how many
// additions had to wait for their turn at least once, or -1 if all blocks wait.
int run_turns(const simt::Question& x, int resident, std::mt19937& random) {
  struct Visit {
    Int64 tile;
    UInt32 turn;
    bool waited = false;
  };
  const auto work_of = [&](Int64 number) {
    OnePassWork<turns_config> w{};
    w.find(x, number);
    std::vector<Visit> visits;
    if (w.none()) return visits;
    OnePassParams p{};
    p.tiles_per_head = Int32(simt::block_count(x.cu_seqlens_q.data, x.Nq, turns_config.block_queries, x.B));
    for (TileWalk<turns_config> at{w}; !w.no_tiles() && at.has_more(); at.advance())
      visits.push_back({at.number(p), w.turn_at(at.tile)});
    return visits;
  };
  const Int64 blocks = x.Hk * simt::block_count(x.cu_seqlens_k.data, x.Nk, one_pass_keys, x.B);
  std::map<Int64, UInt32> counts;
  std::vector<std::vector<Visit>> running;  // the next visit last
  int waits = 0;
  for (Int64 next = 0; next < blocks || !running.empty();) {
    while (next < blocks && int(running.size()) < resident) {
      running.push_back(work_of(next++));
      std::reverse(running.back().begin(), running.back().end());
    }
    std::shuffle(running.begin(), running.end(), random);
    bool progress = false;
    for (auto& visits : running)
      for (bool goes_on = true; goes_on && !visits.empty() && random() % 4;) {
        Visit& v = visits.back();
        goes_on = counts[v.tile] == v.turn;
        if (goes_on)
          ++counts[v.tile], visits.pop_back(), progress = true;
        else
          waits += !v.waited, v.waited = true;
      }
    const auto all_wait = [&] {
      return std::none_of(running.begin(), running.end(),
                          [&](const auto& v) { return v.empty() || counts[v.back().tile] == v.back().turn; });
    };
    if (!progress && !running.empty() && all_wait()) return -1;
    std::erase_if(running, [](const auto& visits) { return visits.empty(); });
  }
  return waits;
}

TEST(HopperOnePass, TurnsComeForAnyNumberOfResidentBlocks) {
  std::mt19937 random(11);
  int waits = 0;
  for (int round = 0; round < 400; ++round) {
    std::vector<Int32> q, k;
    const simt::Question x = random_question(random, q, k);
    for (const int resident : {1, 2, 3, 8, 1000}) {
      const int waited = run_turns(x, resident, random);
      ASSERT_GE(waited, 0) << "Nq " << x.Nq << " Nk " << x.Nk << " resident " << resident;
      ASSERT_TRUE(resident > 1 || waited == 0);
      waits += waited;
    }
  }
  EXPECT_GT(waits, 1000);  // else the order was never in question
}

}  // namespace
}  // namespace tessera::sm90
