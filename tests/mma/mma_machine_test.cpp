// SPDX-License-Identifier: Apache-2.0
// The `mma` forward kernel's own text, run on the host (tests/emulated): copies that arrive as late as they may,
// ldmatrix, mma.sync, masks, options, softmax and epilogue, on the tiles of every class, against float64. Links
// tessera_cases; its include path puts tests/emulated before src.
#include <map>

#include "tests/emulated/steps.hpp"
#include "tests/mma/mma_cases.hpp"
#include "tests/support/long_rows.hpp"
#include "tests/support/senseless.hpp"
#include "tests/support/support.hpp"

namespace tessera::mma {
alignas(1024) unsigned char memory[emulated::Machine::memory_bytes];
}

#include "mma_units.hpp"  // written while this is built

namespace tessera::mma {
namespace {

void run(const Call& call, const char* architecture) {
  const Problem problem = problem_of(call);
  const gpu::Steps steps = steps_of(problem, architecture);
  ASSERT_EQ(steps.reason, "");
  emulated::run_steps(steps, problem, call, mma_units, memory);
}

// Keys of later tokens are larger.
void grow(cases::CaseData& data, double growth) {
  const std::int64_t width = data.spec.Hk * data.spec.D;
  for (std::int64_t e = 0; e < data.k.elements(); ++e)
    data.k.set(e, data.k.get(e) * (1 + growth * double(e / width % data.spec.Nk)));
}

void judge(const cases::CaseData& data, const cases::Expectation& expected) {
  for (const cases::OutputReport& report :
       {cases::compare("o", data.o, expected.o), cases::compare_lse(data.lse, expected.lse)})
    EXPECT_TRUE(report.ok || (data.spec.no_lse && report.name == "lse")) << report.name << " " << report.detail;
  for (const cases::Buffer* buffer : data.buffers())
    EXPECT_TRUE(buffer->margins_intact()) << "a margin or gap was written";
}

class MmaForward : public testing::TestWithParam<const char*> {};

TEST_P(MmaForward, AgreesWithTheReference) {
  int ran = 0;
  for (const MmaCase& c : mma_cases()) {
    if (c.spec.name != GetParam()) continue;
    SCOPED_TRACE(cases::describe(c.spec) + " on " + c.architecture);
    cases::CaseData data = cases::build(c.spec);
    if (c.growth > 0) grow(data, c.growth);
    const cases::Expectation expected = cases::expect(data);
    run(call_of(data), c.architecture);
    judge(data, expected);
    if (HasFailure()) return;
    ++ran;
  }
  EXPECT_GT(ran, 0) << "there is no such group";
}

INSTANTIATE_TEST_SUITE_P(Groups, MmaForward,
                         testing::Values("Full", "HeadDimsBetweenTiles", "OneToManyTilesOfKeys", "Causal",
                                         "QueriesThatSeeNothing", "Windows", "BlocksThatTakeSeveralTiles",
                                         "PackedSequences", "Fronts", "UsedLengths", "Layouts", "Unaligned", "Sinks",
                                         "GrowingScores", "ExtremeNumbers", "ScaleNotPositive", "Softcap", "Alibi",
                                         "Bias", "Mask", "Dropout", "WideOutput", "Everything"),
                         [](const auto& info) { return std::string(info.param); });

const cases::Case rows{
    .Nq = 130, .Nk = 300, .Hq = 2, .Hk = 1, .D = 64, .type = Type::bf16, .backward = false, .seed = 7};

std::vector<double> row_of(const cases::CaseData& data, std::int64_t i) {
  const std::int64_t width = data.spec.Hq * data.spec.D;
  std::vector<double> out;
  for (std::int64_t e = i * width; e < (i + 1) * width; ++e) out.push_back(data.o.get(e));
  return out;
}

// What the other queries of a tile are must not change a bit of this one's: large ones, which are raised again and
// again, do not raise those beside them.
TEST(MmaRows, NeighboursDecideNothing) {
  for (const char* architecture : {"sm_90a", "sm_89"}) {
    const auto first_rows = [&](double size_of_neighbours) {
      cases::CaseData data = cases::build(rows);
      const std::int64_t width = rows.Hq * rows.D;
      for (std::int64_t e = 3 * width; e < data.q.elements(); ++e) data.q.set(e, data.q.get(e) * size_of_neighbours);
      run(call_of(data), architecture);
      std::vector<std::vector<double>> out;
      for (std::int64_t i = 0; i < 3; ++i) out.push_back(row_of(data, i));
      return out;
    };
    EXPECT_EQ(first_rows(1), first_rows(100)) << architecture;
  }
}

// Nor must its place: in its warp, in another one, in another block. Scores rise from tile to tile, so that all rows
// are raised.
TEST(MmaRows, TheirPlaceDecidesNothing) {
  for (const char* architecture : {"sm_90a", "sm_80", "sm_89"}) {
    cases::CaseData data = cases::build(rows);
    grow(data, 0.1);
    const std::int64_t width = rows.Hq * rows.D;
    for (const std::int64_t i : {12, 77, 128, 129})
      for (std::int64_t e = 0; e < width; ++e) data.q.set(i * width + e, data.q.get(3 * width + e));
    run(call_of(data), architecture);
    for (const std::int64_t i : {12, 77, 128, 129}) EXPECT_EQ(row_of(data, i), row_of(data, 3)) << architecture << i;
  }
}

TEST(MmaLengths, SenselessOnesTouchNoOtherSequences) {
  for (const std::int64_t D : {64, 128})
    test::check_senseless_lengths(test::senseless_base(D, Type::bf16, D == 64), false,
                                  [](cases::CaseData& data) { run(call_of(data), "sm_90a"); });
}

TEST(MmaLengths, RowsMayBeLongerThanHeads) {
  test::LongRows data;
  Call call{};
  call.inputs = data.narrowed(data.rows.inputs()), call.outputs = data.narrowed(data.rows.outputs());
  call.options = data.rows.options();
  run(call, "sm_90a");
  data.judge();
}

}  // namespace
}  // namespace tessera::mma
