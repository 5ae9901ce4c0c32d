// SPDX-License-Identifier: Apache-2.0
// The `mma` kernels on a GPU: tables and random configurations against float64; the same bits 1000 times and for a
// sequence in any company. With the tiles of the GPU's own class, or of the one that TESSERA_TILES names. Links
// tessera_cases. tests/mma/mma_machine_test.cpp runs the kernels' text without a GPU.
#include "mma/algorithms.hpp"
#include "mma/plan.hpp"
#include "mma/tiles.hpp"
#include "tests/gpu/hopper.hpp"

namespace tessera::test {
namespace {

constexpr std::size_t parts = 28, configurations = 250;
constexpr std::uint64_t first_seed = 61000;

const mma::TileClass* tile_class() { return mma::class_of(cuda::properties(gpu.id)); }

// A case in 16 bits, the forward pass alone or both; sm_75 has f16 only.
Case in_16_bits(Case c, bool backward) {
  if (!backward) c.backward = c.options.accumulate = false;
  if (c.type == Type::f32) c.type = Type::bf16;
  if (tile_class()->turing()) c.type = Type::f16;
  c.f32_do = false;
  return c;
}
// What the kernels have tiles for: D and Dv up to 256, and 64 KB hold no wide heads of a backward pass.
bool may_be_refused(const Case& c) {
  const bool narrow = c.D + c.dim_v() <= 256;
  return c.D > 256 || c.dim_v() > 256 || c.endless_k > 1 << 29 || (tile_class()->turing() && c.backward && !narrow);
}

class Mma : public Gpu {
 protected:
  void SetUp() override {
    Gpu::SetUp();
    if (!IsSkipped() && !tile_class()) GTEST_SKIP() << "no GPU to test: it is older than sm_75";
  }
};

template <class Parameter>
class MmaWith : public Mma, public testing::WithParamInterface<Parameter> {};

// By which cases are dealt out: the kernel of the forward pass, and of both where one pass makes all gradients.
std::string unit_of(const Case& c) {
  const std::optional<mma::Config> tile = mma::forward_tile(problem_of(c, Pass::forward), *tile_class());
  std::string all = tile ? mma::forward_unit_text(*tile) : "";
  if (!c.backward) return all;
  const gpu::Steps one_pass = mma::one_pass_steps(problem_of(c, Pass::backward), cuda::properties(gpu.id));
  for (const gpu::Step& step : one_pass.list) all += step.unit;
  return all;
}

// Parts of the cases: first of the forward pass, then of both.
class GpuMmaCases : public MmaWith<std::size_t> {};

TEST_P(GpuMmaCases, AgreeWithFloat64) {
  const bool backward = GetParam() >= parts;
  std::vector<Case> cases = extreme_numbers();
  for (const Case& c : suite("all")) cases.push_back(c);
  for (const Case& c : random_cases(first_seed, configurations)) cases.push_back(c);
  for (Case& c : cases) c = in_16_bits(c, backward);
  if (backward) std::erase_if(cases, [](const Case& c) { return !c.backward; });
  SuiteReport all;
  for (const Case& spec : cases_of_part(cases, GetParam() % parts, parts, unit_of)) {
    const CaseReport report = run_case(spec, Execution{.device = gpu, .kernel = mma_kernel});
    expect_ok(report);
    ++(report.skipped ? all.skipped : report.ok ? all.passed : all.failed);
    if (report.skipped) {
      EXPECT_TRUE(may_be_refused(spec)) << to_text(report);
    }
    all.cases.push_back(report);
  }
  std::cout << all.passed + all.failed << " cases ran, " << all.skipped << " were refused\n" << worst_table(all);
  EXPECT_GT(all.passed, 0U) << "a test in which everything was refused has shown nothing";
}

INSTANTIATE_TEST_SUITE_P(All, GpuMmaCases, testing::Range(std::size_t{0}, 2 * parts));

class GpuMmaOnePass : public Mma {};

// Of the family's backward forms a call gets the first that takes it.
TEST_F(GpuMmaOnePass, IsWhatTheFamilyGives) {
  const Case plain = in_16_bits({.name = "plain"}, true);
  Case capped = plain;
  capped.options.softcap = 5;
  const std::pair<Case, std::string> expected[] = {{plain, "mma_one_pass"}, {capped, "mma_two_pass"}};
  for (const auto& [spec, kernel] : expected) {
    CaseData data = build(spec);
    const Placed placed(data, gpu);
    const Plan plan = Plan::backward(placed.inputs(), placed.saved(), placed.gradients(), data.options(),
                                     {.device = gpu, .kernel = mma_kernel});
    EXPECT_EQ(plan.kernel(), kernel);
  }
}

TEST_F(GpuMmaOnePass, GivesTheSameBitsOnAStreamAndInAGraph) {
  for (const std::size_t n : {std::size_t{1}, std::size_t{4}})
    if (const Case spec = in_16_bits(repeated()[n], true); !may_be_refused(spec))
      expect_same_bits_on_a_stream_and_in_a_graph(spec, mma_kernel);
}

class GpuMmaAnyOrder : public MmaWith<std::size_t> {};

// In any order bits change from run to run, but not what they are judged by.
TEST_P(GpuMmaAnyOrder, AgreesWithFloat64) {
  Case spec = in_16_bits(repeated()[GetParam()], true);
  if (may_be_refused(spec)) GTEST_SKIP() << "no GPU to test: its tiles hold no such heads";
  spec.options.deterministic = false;
  const CaseReport report = run_case(spec, Execution{.device = gpu, .kernel = mma_kernel});
  expect_ok(report);
  EXPECT_FALSE(report.skipped) << to_text(report);
}

INSTANTIATE_TEST_SUITE_P(All, GpuMmaAnyOrder, testing::Range(std::size_t{0}, repeated().size()));

class GpuMmaRepetitions : public MmaWith<std::size_t> {};

TEST_P(GpuMmaRepetitions, GiveTheSameBits) {
  const std::size_t count = repeated().size();
  const Case spec = in_16_bits(repeated()[GetParam() % count], GetParam() >= count);
  if (may_be_refused(spec)) GTEST_SKIP() << "no GPU to test: its tiles hold no such heads";
  expect_same_bits_each_time(spec, mma_kernel);
}

INSTANTIATE_TEST_SUITE_P(All, GpuMmaRepetitions, testing::Range(std::size_t{0}, 2 * repeated().size()));

// Turns are passed on for two tiles at once without a mask, one by one under a window, even one that hides nothing; and
// no bit shows it.
class GpuMmaTurns : public MmaWith<std::size_t> {};

TEST_P(GpuMmaTurns, ShowInNoBit) {
  Case spec = in_16_bits(repeated()[GetParam()], true);
  if (may_be_refused(spec)) GTEST_SKIP() << "no GPU to test: its tiles hold no such heads";
  spec.options.causal = false, spec.options.window_left = spec.options.window_right = -1;
  const gpu::Steps one_pass = mma::one_pass_steps(problem_of(spec, Pass::backward), cuda::properties(gpu.id));
  if (!one_pass.reason.empty()) return;  // two passes, which know no turns
  Case windowed = spec;
  windowed.options.window_left = 1 << 20;
  ASSERT_NE(unit_of(windowed), unit_of(spec));
  expect_same_bits_each_time(spec, mma_kernel, &windowed.options);
}

INSTANTIATE_TEST_SUITE_P(All, GpuMmaTurns, testing::Range(std::size_t{0}, repeated().size()));

class GpuMmaCompany : public MmaWith<std::tuple<std::int64_t, Type>> {};

TEST_P(GpuMmaCompany, ASequenceHasTheSameBitsAloneInABatchAndPacked) {
  const auto& [D, type] = GetParam();
  if (tile_class()->turing() && type == Type::bf16) GTEST_SKIP() << "no GPU to test: its tiles have no bf16";
  for (const bool backward : {false, true})
    for (const Case& spec : lone_sequences(D, type, backward)) {
      if (may_be_refused(spec)) continue;
      expect_same_bits_in_company(spec, mma_kernel);
      if (HasFatalFailure()) return;
    }
}

INSTANTIATE_TEST_SUITE_P(All, GpuMmaCompany,
                         testing::Combine(testing::Values(64, 128, 256), testing::Values(Type::f16, Type::bf16)));

}  // namespace
}  // namespace tessera::test
