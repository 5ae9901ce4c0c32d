// SPDX-License-Identifier: Apache-2.0
// The Hopper forward kernel's own text, run on the host (tests/emulated): scheduler, loader, consumers, barriers,
// layouts, masks, options, softmax and epilogue, against float64. Copies happen at once here, products at once or as
// late as they may. Links tessera_cases; its include path puts tests/emulated before src.
#include "tests/emulated/hopper.hpp"

#include "hopper_tiles.hpp"  // written while this is built
#include "tests/emulated/cases.hpp"
#include "tests/support/long_rows.hpp"
#include "tests/support/senseless.hpp"

namespace tessera::sm90 {
namespace {

using emulated::EmulatedCase;

void run(const Inputs& inputs, const Outputs& outputs, const Options& options, int grid) {
  run_emulated<HOPPER_TILES>(inputs, outputs, options, grid);
}

// Keys of later tokens are larger.
void grow(cases::CaseData& data, double growth) {
  const std::int64_t width = data.spec.Hk * data.spec.D;
  for (std::int64_t e = 0; e < data.k.elements(); ++e)
    data.k.set(e, data.k.get(e) * (1 + growth * double(e / width % data.spec.Nk)));
}

void check_group(const std::string& group) {
  int ran = 0;
  for (const EmulatedCase& c : emulated::emulated_cases()) {
    if (c.spec.name != group) continue;
    SCOPED_TRACE(cases::describe(c.spec));
    cases::CaseData data = cases::build(c.spec);
    if (c.growth > 0) grow(data, c.growth);
    const cases::Expectation expected = cases::expect(data);
    Outputs outputs = data.outputs();
    if (c.spec.no_lse) outputs.lse = {};
    run(data.inputs(), outputs, data.options(), c.grid);
    judge(data, expected, !c.spec.no_lse);
    if (testing::Test::HasFailure()) return;
    ++ran;
  }
  EXPECT_GT(ran, 0) << "there is no such group";
}

TEST(HopperForward, Full) { check_group("Full"); }
TEST(HopperForward, HeadDimsBetweenTiles) { check_group("HeadDimsBetweenTiles"); }
TEST(HopperForward, OneToManyTilesOfKeys) { check_group("OneToManyTilesOfKeys"); }
TEST(HopperForward, Causal) { check_group("Causal"); }
TEST(HopperForward, QueriesThatSeeNothing) { check_group("QueriesThatSeeNothing"); }
TEST(HopperForward, Windows) { check_group("Windows"); }
TEST(HopperForward, BlocksThatTakeSeveralTiles) { check_group("BlocksThatTakeSeveralTiles"); }
TEST(HopperForward, PackedSequences) { check_group("PackedSequences"); }
TEST(HopperForward, Fronts) { check_group("Fronts"); }
TEST(HopperForward, UsedLengths) { check_group("UsedLengths"); }
TEST(HopperForward, Layouts) { check_group("Layouts"); }
TEST(HopperForward, Sinks) { check_group("Sinks"); }
TEST(HopperForward, GrowingScores) { check_group("GrowingScores"); }
TEST(HopperForward, ExtremeNumbers) { check_group("ExtremeNumbers"); }
TEST(HopperForward, ScaleNotPositive) { check_group("ScaleNotPositive"); }
TEST(HopperForward, Softcap) { check_group("Softcap"); }
TEST(HopperForward, Alibi) { check_group("Alibi"); }
TEST(HopperForward, Bias) { check_group("Bias"); }
TEST(HopperForward, Mask) { check_group("Mask"); }
TEST(HopperForward, Dropout) { check_group("Dropout"); }
TEST(HopperForward, WideOutput) { check_group("WideOutput"); }
TEST(HopperForward, Everything) { check_group("Everything"); }

// Every 96 keys, a tile, weigh 1.8 times those before, a little less than all before them. No tile outweighs what its
// row has summed, so none is redone for that, and P would leave f16's range if the range did not ask for it.
TEST(HopperForward, SumsThatDouble) {
  const cases::Case spec{.Nq = 3, .Nk = 24 * 96, .Hq = 1, .Hk = 1, .D = 64, .type = Type::f16, .backward = false};
  cases::CaseData data = cases::build(spec);
  for (std::int64_t e = 0; e < data.q.elements(); ++e) data.q.set(e, e % spec.D == 0 ? 1 : 0);
  for (std::int64_t e = 0; e < data.k.elements(); ++e)
    data.k.set(e, e % spec.D == 0 ? 8 * 0.58 * double(e / spec.D / 96) : 0);
  const cases::Expectation expected = cases::expect(data);
  run(data.inputs(), data.outputs(), data.options(), 0);
  judge(data, expected, true);
}

// A tile of queries ends with rows of the next sequence. What those hold must not change a bit of this one's.
TEST(HopperForward, NeighboursDecideNothing) {
  const cases::Case spec{.D = 64, .type = Type::bf16, .packed_q = {20, 44}, .packed_k = {300, 40}, .backward = false};
  const auto rows_of_first = [&](double size_of_neighbour) {
    cases::CaseData data = cases::build(spec);
    const std::int64_t own = 20 * spec.Hq * spec.D;
    for (std::int64_t e = own; e < data.q.elements(); ++e) data.q.set(e, data.q.get(e) * size_of_neighbour);
    run(data.inputs(), data.outputs(), data.options(), 0);
    std::vector<double> out;
    for (std::int64_t e = 0; e < own; ++e) out.push_back(data.o.get(e));
    return out;
  };
  EXPECT_EQ(rows_of_first(1), rows_of_first(100));
}

TEST(HopperForward, SenselessLengths) {
  for (const std::int64_t D : {64, 128})
    test::check_senseless_lengths(test::senseless_base(D, Type::bf16, D == 64), false,
                                  [](cases::CaseData& data) { run(data.inputs(), data.outputs(), data.options(), 3); });
}

TEST(HopperForward, RowsLongerThanHeads) {
  test::LongRows data;
  run(data.narrowed(data.rows.inputs()), data.narrowed(data.rows.outputs()), data.rows.options(), 0);
  data.judge();
}

}  // namespace
}  // namespace tessera::sm90
