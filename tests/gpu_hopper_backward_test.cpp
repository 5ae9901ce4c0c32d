// The Hopper backward kernels on a Hopper GPU: tables and random configurations against float64, and the same bits time
// after time. Links tessera_cases. tests/sm90_backward_test.cpp runs the kernels' text without a GPU.
#include <cmath>
#include <iostream>

#include "cases/random.hpp"
#include "tests/gpu_support.hpp"

namespace tessera::test {
namespace {

constexpr std::size_t parts = 8, configurations = 300;
constexpr std::uint64_t first_seed = 61000;

// The case as these kernels take it: 16 bits, whole 16 bytes, D up to 128, nothing that changes scores.
Case taken(const Case& spec) {
  Case c = made_plain(spec);
  c.sinks = spec.sinks, c.backward = true, c.f32_do = c.f32_o = false;
  if (c.type == Type::f32) c.type = Type::bf16;
  constexpr Style styles[] = {Style::contiguous, Style::heads_first, Style::broadcast};
  if (c.style == Style::gaps || c.style == Style::shifted || c.style == Style::mixed) c.style = styles[c.seed % 3];
  const auto width = [](std::int64_t dims) { return std::min<std::int64_t>((dims + 7) / 8 * 8, 128); };
  c.D = width(c.D), c.Dv = width(c.Dv);
  if (!(c.scale() > 0)) c.options.scale = std::abs(c.scale()) + 0.1;
  c.options.accumulate = c.f32_grads && c.seed % 2 == 0;
  return c;
}

std::vector<Case> long_sequences() {
  std::vector<Case> all;
  for (const std::int64_t D : {64, 128})
    for (const bool causal : {false, true})
      for (const Type type : {Type::f16, Type::bf16}) {
        Case c{.name = "long", .Nq = 1000, .Nk = 1300, .Hq = 4, .Hk = 2, .D = D, .type = type, .dlse = true};
        c.options.causal = causal, c.seed = all.size() + 1;
        all.push_back(c);
      }
  return all;
}

class GpuHopperGradients : public HopperWith<std::size_t> {};

TEST_P(GpuHopperGradients, AgreeWithFloat64) {
  std::vector<Case> cases = long_sequences();
  for (const Case& c : suite("all")) cases.push_back(taken(c));
  for (const Case& c : random_cases(first_seed, configurations)) cases.push_back(taken(c));
  SuiteReport all;
  for (std::size_t n = GetParam(); n < cases.size(); n += parts) {
    const CaseReport report = run_case(cases[n], Execution{.device = gpu, .kernel = hopper_kernel});
    expect_ok(report);
    ++(report.skipped ? all.skipped : report.ok ? all.passed : all.failed);
    if (report.skipped) {
      EXPECT_NE(report.messages.front().find("tensor copies need"), std::string::npos) << to_text(report);
    }
    all.cases.push_back(report);
  }
  std::cout << all.passed + all.failed << " cases ran, " << all.skipped << " were refused\n" << worst_table(all);
  EXPECT_GT(all.passed, 10 * all.skipped) << "a test in which much was refused has shown little";
}

INSTANTIATE_TEST_SUITE_P(All, GpuHopperGradients, testing::Range(std::size_t{0}, parts));

class GpuHopperBackward : public Hopper {};

// Many blocks at once, so that their order varies.
TEST_F(GpuHopperBackward, GivesTheSameBits) {
  std::vector<Case> cases = {
      {.name = "full", .B = 2, .Nq = 700, .Nk = 900, .Hq = 16, .Hk = 16, .D = 64, .type = Type::bf16},
      {.name = "causal_gqa", .B = 3, .Nq = 900, .Nk = 900, .Hq = 16, .Hk = 4, .D = 128, .type = Type::bf16},
      {.name = "window", .B = 2, .Nq = 900, .Nk = 1300, .Hq = 12, .Hk = 4, .D = 96, .type = Type::f16},
      {.name = "packed", .Hq = 16, .Hk = 2, .D = 128, .type = Type::f16, .packed_q = {900, 0, 33, 129, 1200}},
  };
  cases[1].options.causal = cases[3].options.causal = true;
  cases[2].options.window_left = 200, cases[2].options.window_right = 30;
  cases[3].packed_k = {900, 50, 0, 300, 1200};
  for (const Case& spec : cases) {
    SCOPED_TRACE(spec.name);
    CaseData first = build(spec), again = build(spec);
    OnGpu on_first(first, hopper_kernel), on_again(again, hopper_kernel);
    on_first.run();
    on_first.finish();
    for (int run = 0; run < 250; ++run) {
      on_again.upload();  // results of the run before become NaN again
      on_again.run();
      on_again.finish();
      for (const auto& [name, member] :
           {std::pair{"dq", &CaseData::dq}, {"dk", &CaseData::dk}, {"dv", &CaseData::dv}}) {
        expect_same_bits(first.*member, again.*member, name);
        (again.*member).restore();
      }
      if (HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace tessera::test
