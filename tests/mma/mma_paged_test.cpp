// SPDX-License-Identifier: Apache-2.0
// Prefill over the pages of a cache by the `mma` forward kernel's own text, on the emulated machine (tests/emulated):
// against float64, and bit for bit against keys in one piece, with NaN wherever no key lies. And batches of prompts and
// of decoding sequences, which `mma_mixed` divides between two families. Links tessera_cases; its include path puts
// tests/emulated before src.
#include "tests/emulated/steps.hpp"
#include "tests/mma/mma_paged_cases.hpp"

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
  const emulated::Watch watch(call, workspace.data(), workspace.size() * sizeof(float4));
  for (const gpu::Step& step : steps.list) {
    const auto unit = mma_paged_units.find(step.unit);
    ASSERT_NE(unit, mma_paged_units.end()) << "this test has no " << step.unit;
    alignas(64) std::byte own[4096];
    step.write_parameters(given, own);
    emulated::Machine& machine = emulated::Machine::here();
    machine.memory = step.name.starts_with("decode") ? decode::memory : memory;
    machine.shared_bytes = static_cast<std::size_t>(step.shared_bytes);
    machine.run(
        static_cast<int>(step.blocks), step.threads, 0, [&] { unit->second(own); }, step.programmatic);
  }
}

// The kernels on a GPU of this architecture.
test::Prefill on(const char* architecture) {
  return {[architecture](const Call& call, const std::string& kernel) { run(call, architecture, kernel); }, "mma"};
}

// --- prefill

// Tiles of every class, rows of every alignment, options: pages in any order, in one layout and table after the other.
TEST(MmaPages, AgreeWithTheReferenceAndWithKeysInOnePiece) {
  std::size_t turn = 0;
  for (const PagedSpec& c : paged_specs()) {
    SCOPED_TRACE(cases::describe(c.spec) + " on " + c.architecture);
    const CaseData expected = on(c.architecture).judged(c.spec);
    const test::Paging paging{
        .page_size = turn % 2 ? 1 : 16,
        .cache = test::caches[turn % std::size(test::caches)],
        .table = test::tables[turn % std::size(test::tables)],
        .leftpad = turn % 4 > 1 ? std::vector<std::int32_t>{3, 0, 17, 100} : std::vector<std::int32_t>{},
        .seed = ++turn};
    SCOPED_TRACE(describe(paging));
    on(c.architecture).expect_paged(expected, test::PagedCase(expected, paging), 0);
    if (HasFailure()) return;
  }
}

class MmaPageSizes : public testing::TestWithParam<std::int64_t> {};

TEST_P(MmaPageSizes, EveryLayoutAndTableGivesTheBitsOfContiguousKeys) {
  const std::int64_t P = GetParam();
  const PagedSpec c = paged_specs().front();
  const CaseData expected = on(c.architecture).judged(c.spec);
  std::size_t turn = static_cast<std::size_t>(P);
  for (const test::Cache cache : test::caches) {
    test::Paging paging{.page_size = P, .cache = cache, .table = test::tables[++turn % 3], .seed = turn};
    if (turn % 4 > 0) paging.leftpad.assign(4, static_cast<std::int32_t>(P - 2 + turn % 4));
    SCOPED_TRACE(describe(paging));
    on(c.architecture).expect_paged(expected, test::PagedCase(expected, paging), 0);
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, MmaPageSizes, testing::Values(1, 3, 64, 528));

TEST(MmaPages, WhatNobodySeesIsNotRead) { on("sm_90a").expect_unseen_pages_unread({1, 16}); }
TEST(MmaPages, EntriesOutsideThePoolReadAsZeros) { on("sm_90a").expect_bad_entries_read_as_zeros(); }
TEST(MmaPages, PoolsLargerThan32Bits) { on("sm_90a").expect_far_pages_read(true); }
TEST(MmaPages, LengthsBeyondTheTableAreCut) { on("sm_90a").expect_lengths_beyond_the_table_cut(); }

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
    test::Prefill::judge(data, reference);
    on(c.architecture).expect_paged(data, test::PagedCase(data, {.page_size = 3, .table = test::Table::apart}), 0);
    if (c.spec.cached_k.scales == cases::Scales::none && c.spec.cached_v.scales == cases::Scales::none) {
      CaseData wide = cases::build(without_cache(c.spec));
      for (std::int64_t e = 0; e < data.q.elements(); ++e) wide.q.set(e, data.q.get(e));
      for (std::int64_t e = 0; e < data.k.elements(); ++e) wide.k.set(e, data.k.get(e));
      for (std::int64_t e = 0; e < data.v.elements(); ++e) wide.v.set(e, data.v.get(e));
      run(call_of(wide), c.architecture, "mma");
      test::expect_same_bits(wide.o, data.o, "o");
      test::expect_same_bits(wide.lse, data.lse, "lse");
      ++exact;
    }
    if (HasFailure()) return;
  }
  EXPECT_EQ(exact, 3);
}

// --- prompts and decoding sequences in one call

TEST(MmaMixed, EverySequenceHasTheBitsThatItHasAlone) {
  for (const PagedSpec& c : mixed_specs) {
    SCOPED_TRACE(cases::describe(c.spec) + " on " + c.architecture);
    on(c.architecture).expect_sequences_as_alone(c.spec, "mma_mixed", 3);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace tessera::mma
