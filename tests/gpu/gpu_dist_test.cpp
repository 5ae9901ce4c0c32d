// SPDX-License-Identifier: Apache-2.0
// Virtual ranks: threads that share one Hopper GPU, with their rows in its memory. O and LSE have the bits of one call,
// gradients the same bits on any number of ranks, and all obey the rule for float64. Links tessera_cases.
// Implements docs/scale_out.md, "Rows on a GPU".
#include "tests/gpu/ranks.hpp"

namespace tessera::test {
namespace {

class GpuDist : public Hopper {};

TEST_F(GpuDist, VirtualRanksHaveTheBitsOfOneCall) {
  for (const bool causal : {true, false}) {
    const Case spec = case_of_ranks(causal);
    CaseData one = build(spec), first = build(spec);
    run_one_call(one);
    run_ranks(first, {.ranks = 1, .segment = 384});
    for (const int ranks : {2, 4, 8}) {
      SCOPED_TRACE(ranks);
      CaseData data = build(spec);
      run_ranks(data, {.ranks = ranks, .segment = 384});
      expect_same_bits(one.o, data.o, "o");
      expect_same_bits(one.lse, data.lse, "lse");
      expect_same_bits(first.dq, data.dq, "dq");
      expect_same_bits(first.dk, data.dk, "dk");
      expect_same_bits(first.dv, data.dv, "dv");
      ++case_count.judged;
    }
  }
}

TEST_F(GpuDist, EverySchemeIsAccurate) {
  Case spec{.name = "ranks", .Nq = 1000, .Nk = 1000, .Hq = 4, .Hk = 2, .D = 64, .type = Type::bf16};
  spec.options.causal = true;
  for (const Scheme scheme : {Scheme::ring, Scheme::gather})
    for (const int ranks : {1, 3}) {
      CaseData data = build(spec);
      const Expectation expected = expect(data);
      run_ranks(data, {.ranks = ranks, .scheme = scheme});
      EXPECT_TRUE(compare("o", data.o, expected.o).ok && compare_lse(data.lse, expected.lse).ok);
      EXPECT_TRUE(compare("dq", data.dq, expected.dq).ok && compare("dk", data.dk, expected.dk).ok &&
                  compare("dv", data.dv, expected.dv).ok);
      for (const Buffer* buffer : data.buffers()) EXPECT_TRUE(buffer->margins_intact());
      ++case_count.judged;
    }
}

}  // namespace
}  // namespace tessera::test
