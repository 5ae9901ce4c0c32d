// SPDX-License-Identifier: Apache-2.0
// Prefill over the pages of a cache by the Hopper forward kernel's own text, on the emulated machine (tests/emulated):
// against float64, and bit for bit against keys in one piece, with NaN wherever no key lies. Parameters, tensor maps
// among them, are those of the plan: the fake driver encodes the maps. And batches of prompts and of decoding
// sequences, which `hopper_mixed` divides between two families. Links tessera_cases and the fake libcuda; its include
// path puts tests/emulated before src.
#include "api/units.hpp"
#include "sm90/plan.hpp"
#include "tests/emulated/steps.hpp"
#include "tests/sm90/sm90_paged_cases.hpp"

namespace tessera::sm90 {
alignas(1024) unsigned char memory[emulated::Machine::memory_bytes];
}
namespace tessera::decode {
alignas(1024) unsigned char memory[emulated::Machine::memory_bytes];
}

#include "hopper_paged_units.hpp"  // written while this is built

namespace tessera::sm90 {
namespace {

using cases::CaseData;

// The launches of a plan; those of `decode` have a block's memory of their own name.
void run(const Call& call, const std::string& kernel) {
  const Problem problem = problem_of(call);
  const gpu::Steps steps = serving_steps(problem, kernel);
  ASSERT_EQ(steps.reason, "");
  std::vector<float4> workspace(static_cast<std::size_t>(steps.own_bytes) / sizeof(float4) + 1, {NAN, NAN, NAN, NAN});
  const gpu::PassParams common = gpu::forward_params(problem, call, steps.score_scale);
  const gpu::Given given{call, common, reinterpret_cast<std::byte*>(workspace.data())};
  const emulated::Watch watch(call, workspace.data(), workspace.size() * sizeof(float4));
  emulated::Machine::here().tickets(workspace.data());  // tiles are counted there
  for (const gpu::Step& step : steps.list) {
    const auto unit = hopper_paged_units.find(step.unit);
    ASSERT_NE(unit, hopper_paged_units.end()) << "this test has no " << step.unit;
    alignas(64) std::byte own[4096];
    step.write_parameters(given, own);
    emulated::Machine& machine = emulated::Machine::here();
    const bool producers = step.name == "hopper_forward";
    machine.memory = step.name.starts_with("decode") ? decode::memory : memory;
    machine.shared_bytes = static_cast<std::size_t>(step.shared_bytes);
    machine.run(
        static_cast<int>(step.blocks), step.threads, producers ? 128 : 0, [&] { unit->second(own); },
        step.programmatic);
  }
}

const test::Prefill hopper{run, "hopper"};

// Tiles of every head dim, options: pages in any order, in one layout and table after the other.
TEST(HopperPages, AgreeWithTheReferenceAndWithKeysInOnePiece) {
  std::size_t turn = 0;
  constexpr std::int64_t sizes[] = {16, 48, 256};
  for (const cases::Case& spec : paged_specs()) {
    SCOPED_TRACE(cases::describe(spec));
    const CaseData expected = hopper.judged(spec);
    const test::Paging paging{
        .page_size = sizes[turn % std::size(sizes)],
        .cache = test::caches[turn % std::size(test::caches)],
        .table = test::tables[turn % std::size(test::tables)],
        .leftpad = turn % 4 > 1 ? std::vector<std::int32_t>{3, 0, 17, 100} : std::vector<std::int32_t>{},
        .seed = ++turn};
    SCOPED_TRACE(describe(paging));
    hopper.expect_paged(expected, test::PagedCase(expected, paging), 0);
    if (HasFailure()) return;
  }
}

class HopperPageSizes : public testing::TestWithParam<std::int64_t> {};

TEST_P(HopperPageSizes, EveryLayoutAndTableGivesTheBitsOfContiguousKeys) {
  const std::int64_t P = GetParam();
  const CaseData expected = hopper.judged(paged_specs().front());
  std::size_t turn = static_cast<std::size_t>(P);
  for (const test::Cache cache : test::caches) {
    test::Paging paging{.page_size = P, .cache = cache, .table = test::tables[++turn % 3], .seed = turn};
    if (turn % 4 > 0) paging.leftpad.assign(4, static_cast<std::int32_t>(P - 2 + turn % 4));
    SCOPED_TRACE(describe(paging));
    hopper.expect_paged(expected, test::PagedCase(expected, paging), 0);
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, HopperPageSizes, testing::Values(16, 23, 64, 528));

TEST(HopperPages, WhatNobodySeesIsNotRead) { hopper.expect_unseen_pages_unread({16, 31}); }
TEST(HopperPages, EntriesOutsideThePoolReadAsZeros) { hopper.expect_bad_entries_read_as_zeros(); }
TEST(HopperPages, PoolsLargerThan32Bits) { hopper.expect_far_pages_read(false); }
TEST(HopperPages, LengthsBeyondTheTableAreCut) { hopper.expect_lengths_beyond_the_table_cut(); }

TEST(HopperMixed, EverySequenceHasTheBitsThatItHasAlone) {
  for (const cases::Case& spec : mixed_specs) {
    SCOPED_TRACE(cases::describe(spec));
    hopper.expect_sequences_as_alone(spec, "hopper_mixed", 17);
    if (HasFailure()) return;
  }
}

// --- plans

// Or they would have other bits than keys in one piece.
TEST(HopperPagesPlan, TilesAreThoseOfKeysInOnePiece) {
  const cuda::Target target = cuda::target_named("sm_90a");
  for (const api::HeadDims dims : {api::HeadDims{64, 64}, {128, 128}, {192, 128}, {192, 192}, {256, 256}})
    for (const Type type : {Type::f16, Type::bf16})
      for (int options = 0; options < 4; ++options) {
        Problem p = api::plain_problem(Pass::forward, type, dims);
        if (options > 0) p.options.softcap = 5;
        if (options > 1) p.slopes = 1;
        if (options > 2) p.options.dropout = 0.5;
        Config expected = plan_forward(p, target).config;
        p.pages = pages_of(16), expected.paged = true;
        const ForwardPlan plan = plan_forward(p, target);
        ASSERT_EQ(plan.reason, "");
        ASSERT_EQ(plan.config, expected);
        ASSERT_LE(layout_of(expected).bytes, target.shared_bytes);
        ASSERT_TRUE(boxes_suffice(expected));
        ASSERT_TRUE(plan.varied) << "lengths are the device's";
      }
}

// Boxes of a power of two of rows, no larger than a page or a tile, and no smaller than pieces need.
TEST(HopperPagesPlan, Boxes) {
  struct Expected {
    std::int64_t size;
    bool leftpad;
    int keys, first, last;
  };
  for (const Expected& e : {Expected{16, false, 128, 4, 4},
                            {64, false, 128, 6, 6},
                            {64, false, 96, 5, 6},
                            {256, false, 128, 7, 7},
                            {256, false, 80, 4, 6},
                            {48, false, 96, 4, 5},
                            {17, false, 128, 0, 4},
                            {16, true, 128, 0, 4},
                            {528, true, 48, 0, 5},
                            {1 << 29, true, 128, 0, 7}}) {
    const Boxes boxes = boxes_of(Config{.block_keys = e.keys}, Pages{.size = e.size, .leftpad = e.leftpad});
    EXPECT_EQ(boxes.first, e.first) << e.size << " " << e.keys;
    EXPECT_EQ(boxes.last, e.last) << e.size << " " << e.keys;
    EXPECT_LT(boxes.last, box_sizes);
  }
}

TEST(HopperPagesPlan, MixedBatches) {
  Problem p = api::plain_problem(Pass::forward, Type::bf16, {128, 128});
  EXPECT_EQ(serving_steps(p, "hopper_mixed").reason, "k and v are in no pages; hopper takes padded and packed ones");
  p.pages = pages_of(16);
  EXPECT_EQ(serving_steps(p, "hopper_mixed").reason,
            "every sequence has 4096 queries; this is for batches of many and of few");
  p.packed = true, p.options.max_seqlen_q = 64;
  EXPECT_EQ(serving_steps(p, "hopper_mixed").reason, "no sequence has more than 64 rows of queries for each KV head");
  const double scale_of_decode = serving_steps(p, "decode_queue").score_scale;
  p.options.max_seqlen_q = 65;
  const gpu::Steps steps = serving_steps(p, "hopper_mixed");
  ASSERT_EQ(steps.reason, "");
  EXPECT_EQ(steps.score_scale, scale_of_decode);
  std::string names;
  for (const gpu::Step& step : steps.list) names += step.name + " ";
  EXPECT_EQ(names, "hopper_restart hopper_forward decode_schedule decode_attend ");
}

}  // namespace
}  // namespace tessera::sm90
