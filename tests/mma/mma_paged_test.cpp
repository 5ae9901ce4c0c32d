// SPDX-License-Identifier: Apache-2.0
// Prefill over the pages of a cache by the `mma` forward kernel's own text, on the emulated machine (tests/emulated):
// against float64, and bit for bit against keys in one piece, with NaN wherever no key lies. And batches of prompts and
// of decoding sequences, which `mma_mixed` divides between two families. Links tessera_cases; its include path puts
// tests/emulated before src.
#include "tests/emulated/steps.hpp"
#include "tests/mma/mma_paged_cases.hpp"
#include "tests/support/pages.hpp"
#include "tests/support/senseless.hpp"
#include "tests/support/support.hpp"

namespace tessera::mma {
alignas(1024) unsigned char memory[emulated::Machine::memory_bytes];
}
namespace tessera::decode {
alignas(1024) unsigned char memory[emulated::Machine::memory_bytes];
}

#include "mma_paged_units.hpp"  // written while this is built

namespace tessera::mma {
namespace {

using cases::Case;
using cases::CaseData;

// The launches of a plan; those of `decode` have a block's memory of their own name.
void run(const Call& call, const char* architecture, const std::string& kernel) {
  const Problem problem = problem_of(call);
  gpu::Steps steps = serving_steps(problem, architecture, kernel);
  ASSERT_EQ(steps.reason, "");
  std::vector<float4> workspace(static_cast<std::size_t>(steps.own_bytes) / sizeof(float4) + 1, {NAN, NAN, NAN, NAN});
  const gpu::PassParams common = gpu::forward_params(problem, call, steps.score_scale);
  const gpu::Given given{call, common, reinterpret_cast<std::byte*>(workspace.data())};
  for (const gpu::Step& step : steps.list) {
    const auto unit = mma_paged_units.find(step.unit);
    ASSERT_NE(unit, mma_paged_units.end()) << "this test has no " << step.unit;
    alignas(64) std::byte own[4096];
    step.write_parameters(given, own);
    emulated::Machine& machine = emulated::Machine::here();
    machine.memory = step.name.starts_with("decode") ? decode::memory : memory;
    machine.run(static_cast<int>(step.blocks), step.threads, 0, [&] { unit->second(own); });
  }
}

void expect_same(const CaseData& expected, const CaseData& data) {
  test::expect_same_bits(expected.o, data.o, "o");
  test::expect_same_bits(expected.lse, data.lse, "lse");
}

// Keys in one piece, judged by float64.
CaseData judged(const Case& spec, const char* architecture, const std::string& kernel = "mma") {
  CaseData data = cases::build(spec);
  const cases::Expectation expected = cases::expect(data);
  run(call_of(data), architecture, kernel);
  for (const cases::OutputReport& report :
       {cases::compare("o", data.o, expected.o), cases::compare_lse(data.lse, expected.lse)})
    EXPECT_TRUE(report.ok) << report.name << " " << report.detail;
  return data;
}

// The paged call has these bits, and sets these of the status word.
void expect_paged(const CaseData& expected, const test::PagedCase& paged, const char* architecture, std::int32_t bits,
                  const std::string& kernel = "mma") {
  CaseData data = cases::build(expected.spec);
  std::int32_t status = 4;  // somebody else's bit
  Call call = call_of(data);
  call.inputs = paged.in, call.outputs.status = Tensor(&status, Type::i32, {1});
  run(call, architecture, kernel);
  expect_same(expected, data);
  EXPECT_EQ(status, 4 | bits);
  EXPECT_TRUE(data.o.margins_intact() && data.lse.margins_intact());
}

// --- prefill

// Tiles of every class, rows of every alignment, options: pages in any order, in one layout and table after the other.
TEST(MmaPages, AgreeWithTheReferenceAndWithKeysInOnePiece) {
  std::size_t turn = 0;
  for (const PagedSpec& c : paged_specs()) {
    SCOPED_TRACE(cases::describe(c.spec) + " on " + c.architecture);
    const CaseData expected = judged(c.spec, c.architecture);
    const test::Paging paging{
        .page_size = turn % 2 ? 1 : 16,
        .cache = test::caches[turn % std::size(test::caches)],
        .table = test::tables[turn % std::size(test::tables)],
        .leftpad = turn % 4 > 1 ? std::vector<std::int32_t>{3, 0, 17, 100} : std::vector<std::int32_t>{},
        .seed = ++turn};
    SCOPED_TRACE(describe(paging));
    expect_paged(expected, test::PagedCase(expected, paging), c.architecture, 0);
    if (HasFailure()) return;
  }
}

class MmaPageSizes : public testing::TestWithParam<std::int64_t> {};

TEST_P(MmaPageSizes, EveryLayoutAndTableGivesTheBitsOfContiguousKeys) {
  const std::int64_t P = GetParam();
  const PagedSpec c = paged_specs().front();
  const CaseData expected = judged(c.spec, c.architecture);
  std::size_t turn = static_cast<std::size_t>(P);
  for (const test::Cache cache : test::caches) {
    test::Paging paging{.page_size = P, .cache = cache, .table = test::tables[++turn % 3], .seed = turn};
    if (turn % 4 > 0) paging.leftpad.assign(4, static_cast<std::int32_t>(P - 2 + turn % 4));
    SCOPED_TRACE(describe(paging));
    expect_paged(expected, test::PagedCase(expected, paging), c.architecture, 0);
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, MmaPageSizes, testing::Values(1, 3, 64, 528));

// Pages behind a window have been given back: their entries say anything, and nobody reads them.
TEST(MmaPages, WhatNobodySeesIsNotRead) {
  Case spec = chunks(64);
  spec.options.window_left = 100, spec.B = 1, spec.used_q = {}, spec.used_k = {};
  const CaseData expected = judged(spec, "sm_90a");
  for (const std::int64_t P : {1, 16}) {
    test::PagedCase paged(expected, {.page_size = P, .leftpad = {40}});
    // Query 0 stands at key 230 and sees no key before 130.
    for (std::int64_t j = 0; j + P <= 130; ++j) paged.entry(0, j) = test::PagedCase::never_read;
    expect_paged(expected, paged, "sm_90a", 0);
  }
}

// A used entry outside of the pool reads as zeros and sets the bit; other sequences keep theirs.
TEST(MmaPages, EntriesOutsideThePoolReadAsZeros) {
  constexpr std::int64_t P = 16;
  for (const test::Table table : test::tables)
    for (const std::int32_t bad : {std::numeric_limits<std::int32_t>::min(), 0}) {
      const Case spec = chunks(64);
      CaseData data = cases::build(spec);
      test::PagedCase paged(data, {.page_size = P, .table = table});
      const std::int32_t entry = bad == 0 ? static_cast<std::int32_t>(paged.pages) : bad;
      for (const std::int64_t j : {std::int64_t{0}, 5 * P, std::int64_t{256}}) {
        paged.entry(1, j) = entry;
        for (const bool side : {false, true}) {
          if (table == test::Table::apart && side) continue;  // the other table is as it was
          cases::Buffer& rows = side ? data.v : data.k;
          for (std::int64_t key = j / P * P; key < std::min<std::int64_t>(257, j / P * P + P); ++key)
            for (std::int64_t e = 0; e < 64; ++e) rows.set((data.sequences[1].row_k + key) * 64 + e, 0);
        }
      }
      run(call_of(data), "sm_90a", "mma");
      expect_paged(data, paged, "sm_90a", gpu::page_outside_pool);
      if (HasFailure()) return;
    }
}

// A length beyond what the table holds, or a negative one, is cut and told; the other sequences keep their bits.
TEST(MmaPages, LengthsBeyondTheTableAreCut) {
  const Case spec = chunks(64);
  const CaseData expected = judged(spec, "sm_90a");
  for (const auto& [b, length] : {std::pair<std::size_t, std::int32_t>{3, 1 << 30}, {3, -7}, {1, 1 << 30}}) {
    test::PagedCase paged(expected, {.page_size = 16});
    paged.lengths[b] = length;
    CaseData data = cases::build(spec);
    std::int32_t status = 0;
    Call call = call_of(data);
    call.inputs = paged.in, call.outputs.status = Tensor(&status, Type::i32, {1});
    run(call, "sm_90a", "mma");
    EXPECT_TRUE(status & gpu::beyond_bounds);
    for (std::size_t other = 0; other < 4; ++other) {
      if (other == b) continue;
      EXPECT_EQ(test::bits_of_sequence(data, other, false), test::bits_of_sequence(expected, other, false)) << other;
    }
    EXPECT_TRUE(data.o.margins_intact() && data.lse.margins_intact());
  }
}

// Pages of 8 bits: against float64, in pages of two sizes; without scales they have the bits of the same numbers in 16.
TEST(MmaPages, Of8BitsAreConvertedExactly) {
  int exact = 0;
  for (const PagedSpec& c : eight_bit_specs()) {
    SCOPED_TRACE(cases::describe(c.spec) + " on " + c.architecture);
    CaseData data = cases::build(c.spec);
    const cases::Expectation reference = cases::expect(data);
    const test::PagedCase paged(data, {.page_size = 16, .leftpad = {3, 0, 17, 100}});
    Call call = call_of(data);
    call.inputs = paged.in;
    run(call, c.architecture, "mma");
    for (const cases::OutputReport& report :
         {cases::compare("o", data.o, reference.o), cases::compare_lse(data.lse, reference.lse)})
      EXPECT_TRUE(report.ok) << report.name << " " << report.detail;
    expect_paged(data, test::PagedCase(data, {.page_size = 3, .table = test::Table::apart}), c.architecture, 0);
    if (c.spec.cached_k.scales == cases::Scales::none && c.spec.cached_v.scales == cases::Scales::none) {
      CaseData wide = cases::build(without_cache(c.spec));
      for (std::int64_t e = 0; e < data.q.elements(); ++e) wide.q.set(e, data.q.get(e));
      for (std::int64_t e = 0; e < data.k.elements(); ++e) wide.k.set(e, data.k.get(e));
      for (std::int64_t e = 0; e < data.v.elements(); ++e) wide.v.set(e, data.v.get(e));
      run(call_of(wide), c.architecture, "mma");
      expect_same(wide, data);
      ++exact;
    }
    if (HasFailure()) return;
  }
  EXPECT_EQ(exact, 3);
}

// --- prompts and decoding sequences in one call

// The sequences of a packed case, alone: their own call, whose kernel their own number of rows chooses.
CaseData alone(const CaseData& batch, std::size_t b, const char* architecture) {
  const cases::Sequence& s = batch.sequences[b];
  Case spec = batch.spec;
  const bool few = s.Nq * spec.Hq / spec.Hk <= gpu::few_rows;
  spec.packed_q = {static_cast<std::int32_t>(s.Nq)}, spec.packed_k = {static_cast<std::int32_t>(s.Nk)};
  spec.options.max_seqlen_q = few ? s.Nq : 90;
  CaseData data = cases::build(spec);
  const auto copy = [](const cases::Buffer& from, cases::Buffer& to, std::int64_t row, std::int64_t count,
                       std::int64_t width) {
    for (std::int64_t e = 0; e < count * width; ++e) to.set(e, from.get(row * width + e));
  };
  copy(batch.q, data.q, s.row_q, s.Nq, spec.Hq * spec.D);
  copy(batch.k, data.k, s.row_k, s.Nk, spec.Hk * spec.D), copy(batch.v, data.v, s.row_k, s.Nk, spec.Hk * spec.dim_v());
  const test::PagedCase paged(data, {.page_size = 3, .seed = b + 1});
  Call call = call_of(data);
  call.inputs = paged.in;
  run(call, architecture, few ? "decode" : "mma");
  return data;
}

// One call is right, and each of its sequences has the bits that it has alone: few rows those of `decode`, many those
// of `mma`.
TEST(MmaMixed, EverySequenceHasTheBitsThatItHasAlone) {
  for (const PagedSpec& c : mixed_specs) {
    SCOPED_TRACE(cases::describe(c.spec) + " on " + c.architecture);
    CaseData data = cases::build(c.spec);
    const cases::Expectation expected = cases::expect(data);
    const test::PagedCase paged(data, {.page_size = 16, .leftpad = {0, 5, 16, 0, 1, 3}});
    std::int32_t status = 0;
    Call call = call_of(data);
    call.inputs = paged.in, call.outputs.status = Tensor(&status, Type::i32, {1});
    run(call, c.architecture, "mma_mixed");
    EXPECT_EQ(status, 0);
    for (const cases::OutputReport& report :
         {cases::compare("o", data.o, expected.o), cases::compare_lse(data.lse, expected.lse)})
      EXPECT_TRUE(report.ok) << report.name << " " << report.detail;
    for (std::size_t b = 0; b < data.sequences.size(); ++b) {
      if (data.sequences[b].Nq == 0) continue;
      const CaseData lone = alone(data, b, c.architecture);
      EXPECT_EQ(test::bits_of_sequence(data, b, false), test::bits_of_sequence(lone, 0, false)) << "sequence " << b;
    }
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace tessera::mma
