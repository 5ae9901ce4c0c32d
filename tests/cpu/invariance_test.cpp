// SPDX-License-Identifier: Apache-2.0
// Same bits: for any number of threads, run after run, and for a sequence alone, padded in a batch, packed among
// others. Links tessera_cases. Implements docs/numerics.md, "Deterministic, batch-invariant".
#include "cases/random.hpp"
#include "tests/support/company.hpp"
#include "tests/support/support.hpp"

namespace tessera::test {
namespace {

template <class Body>
void in_each_type_and_kernel(Body body) {
  for (const std::string& kernel : available_kernels())
    for (Type type : {Type::f32, Type::f16, Type::bf16})
      for (Case spec : mixes()) {
        if (kernel == "reference" && type != Type::f32) continue;  // slow, and of one text for all types
        spec.type = type;
        SCOPED_TRACE(kernel + " " + name_of(type) + " " + spec.name);
        body(spec, kernel);
        if (testing::Test::HasFatalFailure()) return;
      }
}

CaseData ran(const Case& spec, const std::string& kernel, int threads) {
  CaseData data = build(spec);
  run(data, {.threads = threads, .kernel = kernel.c_str()});
  return data;
}

TEST(Threads, OneTwoAndSevenGiveTheSameBits) {
  in_each_type_and_kernel([](Case spec, const std::string& kernel) {
    spec.B = 2;
    const CaseData one = ran(spec, kernel, 1);
    for (int threads : {2, 7}) expect_same_outputs(one, ran(spec, kernel, threads));
  });
}

// One head, many keys: several tasks add to the same image of dQ, each part of it in the order of their keys.
TEST(Threads, SpansOfKeysTakeTurns) {
  for (const std::string& kernel : available_kernels())
    for (const Type type : {Type::f32, Type::bf16})
      for (const bool banded : {false, true}) {
        if (kernel == "reference") continue;
        Case spec{.name = "spans", .Nq = 900, .Nk = 4000, .Hq = 2, .Hk = 1, .D = 16, .type = type};
        spec.options.causal = banded;
        if (banded) spec.options.window_left = 3300;
        SCOPED_TRACE(kernel + " " + name_of(type) + (banded ? " banded" : ""));
        const CaseData one = ran(spec, kernel, 1);
        for (int repeat = 0; repeat < 4; ++repeat) expect_same_outputs(one, ran(spec, kernel, 8));
      }
}

TEST(Threads, RandomConfigurationsGiveTheSameBits) {
  const auto kernels = available_kernels();
  for (std::uint64_t seed = 900; seed < 940; ++seed) {
    const Case spec = random_case(seed);
    SCOPED_TRACE(describe(spec));
    const std::string& kernel = kernels[seed % kernels.size()];
    const CaseData one = ran(spec, kernel, 1);
    for (int threads : {2, 7}) expect_same_outputs(one, ran(spec, kernel, threads));
  }
}

TEST(Runs, TwoRunsGiveTheSameBits) {
  in_each_type_and_kernel([](const Case& spec, const std::string& kernel) {
    expect_same_outputs(ran(spec, kernel, 0), ran(spec, kernel, 0));
  });
}

TEST(Batch, ASequenceHasTheSameBitsAloneInABatchAndPacked) {
  in_each_type_and_kernel([](const Case& spec, const std::string& kernel) {
    Case lone = spec;
    lone.options.batch0 = place;  // dropout counts sequences: the lone one keeps its number
    const CaseData alone = ran(lone, kernel, 2);
    for (const Company& other : companies(spec)) {
      SCOPED_TRACE(other.name);
      CaseData company = build(other.spec);
      take_place(alone, company);
      run(company, {.threads = 2, .kernel = kernel.c_str()});
      expect_same_sequence(alone, company);
    }
  });
}

TEST(Hints, MaximumLengthsNeverChangeABit) {
  for (const std::string& kernel : available_kernels()) {
    Case spec = find_case("everything_packed_f32");
    const CaseData none = ran(spec, kernel, 0);
    for (std::int64_t beyond : {0, 1, 5000}) {
      spec.options.max_seqlen_q = 130 + beyond, spec.options.max_seqlen_k = 194 + beyond;
      expect_same_outputs(none, ran(spec, kernel, 0));
    }
  }
}

}  // namespace
}  // namespace tessera::test
