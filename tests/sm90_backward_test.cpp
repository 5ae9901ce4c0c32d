// The Hopper backward kernels' own text, run on the host (tests/emulated): loader, consumers, barriers, layouts, masks
// and gradients, against float64. Delta, LSE and rows that no sequence uses, which the ladder's kernels prepare, are
// prepared here. Links tessera_cases; its include path puts tests/emulated before src.
#include <cmath>
#include <numbers>
#include <utility>

#include "core/check.hpp"
#include "cuda/device.hpp"
#include "simt/arguments.hpp"
#include "sm90/plan.hpp"
#include "sm90/tiles.hpp"
#include "tests/emulated/machine.hpp"
#include "tests/support.hpp"
// The machine comes first: device text needs it.
#include "sm90/kernel/backward.cuh"

namespace tessera::sm90 {

alignas(1024) unsigned char memory[emulated::Machine::memory_bytes];

namespace {

template <BackwardConfig config>
bool launch_if(const BackwardConfig& wanted, const BackwardParams& p, std::int64_t blocks) {
  if (!(wanted == config)) return false;
  emulated_element = config.element;
  emulated::Machine& machine = emulated::Machine::here();
  machine.memory = memory;
  machine.run(int(blocks), threads_of(config), [&] { backward<config>(p); });
  return true;
}

constexpr BackwardConfig typed(BackwardConfig tile, Element element, Element dX, Element dY) {
  tile.element = element, tile.dX = dX, tile.dY = owns_queries(tile) ? Element::none : dY;
  return tile;
}

// The tile with the types that the cases below have.
template <BackwardConfig tile>
bool launch_tile(const BackwardConfig& c, const BackwardParams& p, std::int64_t blocks) {
  using enum Element;
  if (launch_if<typed(tile, bf16, bf16, bf16)>(c, p, blocks) || launch_if<typed(tile, f16, f16, f16)>(c, p, blocks) ||
      launch_if<typed(tile, bf16, f32, f32)>(c, p, blocks))
    return true;
  if constexpr (!owns_queries(tile))
    return launch_if<typed(tile, bf16, bf16, none)>(c, p, blocks) ||
           launch_if<typed(tile, bf16, none, bf16)>(c, p, blocks);
  return false;
}

template <std::size_t... n>
bool launch_one(const BackwardConfig& c, const BackwardParams& p, std::int64_t blocks, std::index_sequence<n...>) {
  return (launch_tile<backward_tiles[n]>(c, p, blocks) || ...);
}

// What the ladder's kernels do before: delta, and LSE in units of log2(e), +inf for rows that see nothing.
void prepare(const cases::CaseData& data, const simt::BackwardParams& p) {
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

// Rows of a gradient that no sequence uses become 0.
void clear(cases::Buffer& gradient, const cases::CaseData& data, bool keys) {
  if (!gradient || data.spec.options.accumulate) return;
  const std::int64_t width = (keys ? data.spec.Hk : data.spec.Hq) * gradient.tensor().shape[gradient.tensor().ndim - 1];
  std::vector<bool> used(std::size_t(gradient.elements() / width));
  for (const cases::Sequence& s : data.sequences)
    for (std::int64_t i = 0; i < (keys ? s.Nk : s.Nq); ++i) used[std::size_t((keys ? s.row_k : s.row_q) + i)] = true;
  for (std::int64_t e = 0; e < gradient.elements(); ++e)
    if (!used[std::size_t(e / width)]) gradient.set(e, 0);
}

// As HopperBackwardPlan::run of sm90/backend.cpp does it, but the scale is the caller's own: these products lose
// nothing.
void run(cases::CaseData& data) {
  forward(data.inputs(), data.outputs(), data.options(), {});
  Call call{};
  call.inputs = data.inputs(), call.saved = data.saved(), call.gradients = data.gradients();
  call.options = data.options();
  Problem problem = check_backward(call.inputs, call.saved, call.gradients, call.options, {});
  const BackwardPlan plan = plan_backward(problem, cuda::target_named("sm_90a"));
  ASSERT_EQ(plan.reason, "");
  std::vector<float> workspace(simt::workspace_bytes(problem, {}) / sizeof(float), NAN);
  call.execution.workspace = workspace.data();
  const simt::BackwardParams params = simt::backward_params(problem, call, {});
  prepare(data, params);
  clear(data.dq, data, false), clear(data.dk, data, true), clear(data.dv, data, true);
  for (const auto& [c, blocks] : plan.passes) {
    const bool queries = owns_queries(c);
    const BackwardParams p{.X = emulated_map(queries ? call.inputs.q : call.inputs.k, 64),
                           .Y = emulated_map(queries ? call.saved.d_o : call.inputs.v, 64),
                           .x = emulated_map(queries ? call.inputs.k : call.inputs.q, c.block_columns),
                           .y = emulated_map(queries ? call.inputs.v : call.saved.d_o, c.block_columns),
                           .call = params,
                           .D = Int32(problem.D),
                           .Dv = Int32(problem.Dv),
                           .factor = float(problem.options.scale * std::numbers::log2e)};
    ASSERT_TRUE(launch_one(c, p, blocks, std::make_index_sequence<std::size(backward_tiles)>{}))
        << "this test has no kernel for the types of the case";
  }
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

// In bf16 and with heads that share one of K and V, unless the case says otherwise. `poison`: what queries that see
// nothing hold must not matter, and is NaN.
void check(cases::Case c, bool poison = false) {
  if (c.type == Type::f32) c.type = Type::bf16;
  if (c.Hq <= 2) c.Hk = 1;
  SCOPED_TRACE(cases::describe(c));
  cases::CaseData data = cases::build(c);
  const cases::Expectation expected = cases::expect(data);
  if (poison) poison_blind_queries(data, expected);
  run(data);
  const auto judged = [](const cases::OutputReport& report) {
    EXPECT_TRUE(report.ok) << report.name << " " << report.detail;
  };
  if (data.dq) judged(cases::compare("dq", data.dq, expected.dq));
  if (data.dk) judged(cases::compare("dk", data.dk, expected.dk));
  if (data.dv) judged(cases::compare("dv", data.dv, expected.dv));
  for (const cases::Buffer* buffer : std::as_const(data).buffers())
    EXPECT_TRUE(buffer->margins_intact()) << "a margin or gap was written";
}

TEST(HopperBackward, Full) {
  check({.Nq = 130, .Nk = 250, .D = 64});
  check({.Nq = 200, .Nk = 150, .D = 128});
  check({.Nq = 65, .Nk = 200, .Hq = 1, .D = 64, .type = Type::f16});
  check({.Nq = 65, .Nk = 100, .Hq = 1, .D = 128, .type = Type::f16});
}

TEST(HopperBackward, OneToManyTiles) {
  for (const std::int64_t N : {1, 63, 64, 65, 112, 113, 193}) {
    check({.Nq = 3, .Nk = N, .Hq = 1, .Hk = 1});
    check({.Nq = N, .Nk = 3, .Hq = 1, .Hk = 1});
  }
  check({.Nq = 3, .Nk = 500, .Hq = 1, .Hk = 1});
  check({.Nq = 500, .Nk = 3, .Hq = 1, .Hk = 1});
  check({.Nq = 460, .Nk = 30, .Hq = 1, .Hk = 1, .D = 128});
  check({.Nq = 30, .Nk = 460, .Hq = 1, .Hk = 1, .D = 128});
}

TEST(HopperBackward, HeadDimsBetweenTiles) {
  check({.Nq = 70, .Nk = 100, .D = 40, .Dv = 24});
  check({.Nq = 70, .Nk = 100, .D = 80, .Dv = 72, .options = {.causal = true}});
  check({.Nq = 70, .Nk = 100, .D = 64, .Dv = 128});
}

TEST(HopperBackward, GroupsOfHeads) {
  check({.B = 2, .Nq = 70, .Nk = 140, .Hq = 6, .Hk = 2, .D = 64, .options = {.causal = true}});
  check({.B = 2, .Nq = 140, .Nk = 70, .Hq = 3, .Hk = 1, .D = 128});
  check({.B = 2, .Nq = 70, .Nk = 70, .Hq = 3, .Hk = 3, .D = 128});
}

TEST(HopperBackward, Causal) {
  check({.Nq = 300, .Nk = 300, .D = 64, .options = {.causal = true}});
  check({.Nq = 150, .Nk = 230, .D = 128, .options = {.causal = true}});
  check({.Nq = 140, .Nk = 300, .D = 128, .options = {.causal = true, .alignment = Alignment::top_left}});
}

TEST(HopperBackward, QueriesThatSeeNothing) {
  for (const bool poison : {false, true}) {
    check({.Nq = 300, .Nk = 100, .D = 128, .options = {.causal = true}}, poison);
    check({.Nq = 300, .Nk = 40, .D = 64, .options = {.causal = true}}, poison);
  }
}

TEST(HopperBackward, Windows) {
  check({.Nq = 300, .Nk = 300, .D = 64, .options = {.window_left = 100, .window_right = 20}});
  check({.Nq = 450, .Nk = 600, .D = 64, .options = {.causal = true, .window_left = 10}});
  check({.Nq = 130, .Nk = 400, .D = 128, .options = {.window_left = 0, .window_right = 0}});
}

TEST(HopperBackward, PackedSequences) {
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
TEST(HopperBackward, UsedLengths) {
  check({.B = 3, .Nq = 150, .Nk = 260, .D = 64, .used_q = {150, 20, 64}, .used_k = {100, 260, 129}});
  check({.D = 128,
         .options = {.causal = true},
         .packed_q = {70, 160, 70},
         .packed_k = {130, 170, 120},
         .used_q = {0, 130, 65},
         .used_k = {100, 3, 119}});
}

TEST(HopperBackward, Layouts) {
  for (const cases::Style style : {cases::Style::heads_first, cases::Style::broadcast})
    for (const std::int64_t D : {64, 128})
      check({.B = 2, .Nq = 130, .Nk = 100, .Hq = 4, .Hk = 2, .D = D, .options = {.causal = true}, .style = style});
}

TEST(HopperBackward, SinksAndLseGradient) {
  check({.Nq = 64, .Nk = 200, .D = 128, .sinks = cases::Sinks::finite, .dlse = true});
  check({.Nq = 200, .Nk = 100, .D = 64, .options = {.causal = true}, .sinks = cases::Sinks::some_infinite});
}

TEST(HopperBackward, WideGradients) {
  check({.B = 2, .Nq = 130, .Nk = 150, .D = 64, .used_q = {130, 70}, .f32_grads = true});
  check({.Nq = 70, .Nk = 100, .D = 104, .Dv = 88, .f32_grads = true});
}

TEST(HopperBackward, Accumulation) {
  check({.Nq = 100, .Nk = 130, .D = 64, .options = {.accumulate = true}, .f32_grads = true});
  check({.Nq = 200, .Nk = 100, .D = 120, .options = {.causal = true, .accumulate = true}, .f32_grads = true});
  check({.B = 2,
         .Nq = 70,
         .Nk = 100,
         .options = {.accumulate = true},
         .used_q = {10, 70},
         .used_k = {100, 0},
         .f32_grads = true});
}

TEST(HopperBackward, SomeGradients) {
  for (const std::int64_t D : {64, 128}) {
    check({.Nq = 70, .Nk = 140, .D = D, .grads = {.dk = false, .dv = false}});
    check({.Nq = 140, .Nk = 70, .D = D, .grads = {.dq = false, .dv = false}});
    check({.Nq = 140, .Nk = 70, .D = D, .grads = {.dq = false, .dk = false}});
  }
}

TEST(HopperBackward, ExtremeNumbers) {
  for (const auto distribution : {cases::Distribution::cold, cases::Distribution::outlier, cases::Distribution::huge})
    for (const Type type : {Type::bf16, Type::f16})
      check({.Nq = 70, .Nk = 200, .D = 64, .type = type, .distribution = distribution});
}

}  // namespace
}  // namespace tessera::sm90
