// SPDX-License-Identifier: Apache-2.0
// The order of works of the Hopper kernels, on the host: every work once, the blocks of a head in order, and no more
// heads at a time than the L2 cache has room for, unless turns ask for them. Links tessera_static.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "api/kernels.hpp"
#include "api/units.hpp"
#include "cuda/device.hpp"
#include "sm90/one_pass_plan.hpp"
#include "sm90/plan.hpp"

namespace tessera::sm90 {
namespace {

std::int64_t works_of(const WorkOrder& order) { return std::int64_t{order.heads} * order.blocks; }

// The most heads that any `count` works which follow each other are of.
int most_heads(const WorkOrder& order, std::int64_t count) {
  std::vector<int> left(static_cast<std::size_t>(order.heads));
  int here = 0, most = 0;
  for (std::int64_t n = 0; n < works_of(order); ++n) {
    here += left[static_cast<std::size_t>(work_at(order, n).head)]++ == 0;
    if (n >= count) here -= --left[static_cast<std::size_t>(work_at(order, n - count).head)] == 0;
    most = std::max(most, here);
  }
  return most;
}

void check_order(const WorkOrder& order) {
  std::vector<std::int64_t> next(static_cast<std::size_t>(order.heads), 0);
  for (std::int64_t n = 0; n < works_of(order); ++n) {
    const WorkPlace at = work_at(order, n);
    ASSERT_TRUE(at.head >= 0 && at.head < order.heads) << n;
    ASSERT_EQ(at.block, next[static_cast<std::size_t>(at.head)]++) << n;
  }
  for (const std::int64_t blocks : next) ASSERT_EQ(blocks, order.blocks);
}

TEST(WorkOrder, EveryWorkIsTakenOnceAndThoseOfAHeadInOrder) {
  for (Int32 heads = 1; heads <= 7; ++heads)
    for (Int32 blocks = 1; blocks <= 6; ++blocks)
      for (Int32 together = 1; together <= heads; ++together)
        for (Int32 stagger = 1; stagger <= blocks; ++stagger) {
          check_order({heads, blocks, together, stagger});
          if (HasFatalFailure()) FAIL() << heads << " " << blocks << " " << together << " " << stagger;
        }
}

TEST(WorkOrder, SectionsFollowEachOther) {
  const WorkOrder order{.heads = 5, .blocks = 2, .together = 2, .stagger = 2};
  const std::vector<std::pair<int, int>> wanted{{0, 0}, {1, 0}, {0, 1}, {1, 1}, {2, 0},
                                                {3, 0}, {2, 1}, {3, 1}, {4, 0}, {4, 1}};
  for (std::size_t n = 0; n < wanted.size(); ++n) {
    const WorkPlace at = work_at(order, Int64(n));
    EXPECT_EQ(std::pair(int(at.head), int(at.block)), wanted[n]) << n;
  }
}

TEST(WorkOrder, StaggeredHeadsAreInDifferentPhases) {
  const WorkOrder order{.heads = 4, .blocks = 4, .together = 1, .stagger = 2};
  const std::vector<std::pair<int, int>> wanted{{0, 0}, {0, 1}, {0, 2}, {1, 0}, {0, 3}, {1, 1}, {1, 2}, {2, 0},
                                                {1, 3}, {2, 1}, {2, 2}, {3, 0}, {2, 3}, {3, 1}, {3, 2}, {3, 3}};
  for (std::size_t n = 0; n < wanted.size(); ++n) {
    const WorkPlace at = work_at(order, Int64(n));
    EXPECT_EQ(std::pair(int(at.head), int(at.block)), wanted[n]) << n;
  }
}

// As many as plans admit: nothing exceeds 64 bits, and the ends are found.
TEST(WorkOrder, LargestNumbers) {
  for (const Int32 stagger : {1, 512, 1 << 15}) {
    const WorkOrder order{.heads = 1 << 15, .blocks = 1 << 15, .together = 3, .stagger = stagger};
    EXPECT_EQ(work_at(order, 0).block, 0);
    EXPECT_EQ(work_at(order, works_of(order) - 1).block, order.blocks - 1);
    EXPECT_EQ(work_at(order, works_of(order) - 1).head, order.heads - 1);
  }
  const WorkOrder thin{.heads = 1 << 30, .blocks = 1, .together = 5, .stagger = 1};
  EXPECT_EQ(work_at(thin, works_of(thin) - 1).head, thin.heads - 1);
}

// --- plans

cuda::Target h200() { return cuda::target_named("sm_90a"); }

// A point of the benchmarks' grid: 16,384 tokens, hidden size 2048.
Problem point(Pass pass, std::int64_t D, std::int64_t N, bool causal, std::int64_t group = 1) {
  Problem p = api::plain_problem(pass, Type::bf16, {D, D});
  p.B = 16384 / N, p.Nq = p.Nk = N, p.Hq = 2048 / D * (group > 1 ? 2 : 1), p.Hk = p.Hq / group;
  p.options.causal = causal;
  return p;
}

OnePassPlan backward(std::int64_t D, std::int64_t N, bool causal, bool deterministic, std::int64_t group = 1) {
  Problem p = point(Pass::backward, D, N, causal, group);
  p.options.deterministic = deterministic;
  return plan_one_pass(p, h200());
}

TEST(WorkOrder, PlansTakeEveryWorkOnce) {
  for (const std::int64_t D : {64, 128})
    for (const std::int64_t N : {512, 1024, 2048, 4096, 8192, 16384})
      for (const bool causal : {false, true})
        for (const bool deterministic : {false, true})
          for (const std::int64_t group : {1, 4}) {
            const OnePassPlan plan = backward(D, N, causal, deterministic, group);
            ASSERT_EQ(plan.reason, "");
            ASSERT_EQ(works_of(plan.order), plan.blocks);
            ASSERT_NO_FATAL_FAILURE(check_order(plan.order));
          }
}

// In any order, what a full grid reads and adds to, Q, dO and the sums of dQ of its works' heads, hardly exceeds the
// cache, also where the last works of a section meet the first of the next.
TEST(WorkOrder, LiveHeadsFitIntoTheCache) {
  for (const std::int64_t D : {64, 128})
    for (const std::int64_t N : {2048, 4096, 8192, 16384})
      for (const bool causal : {false, true}) {
        const OnePassPlan plan = backward(D, N, causal, false);
        const std::int64_t head_bytes = N * 8 * D;
        EXPECT_LE(most_heads(plan.order, plan.grid) * head_bytes, std::int64_t{h200().l2_bytes} * 6 / 5)
            << D << " " << N << ": " << plan.order.together;
      }
}

// In order it takes so many heads that a head's works come to a tile one after another.
TEST(WorkOrder, TurnsAskForHeads) {
  const auto expect = [](std::int64_t D, std::int64_t N, bool causal) {
    const OnePassPlan plan = backward(D, N, causal, true);
    const std::int64_t tiles = N / plan.config.block_queries;
    const std::int64_t wanted = std::min<std::int64_t>((causal ? 4 : 1) * 132 / tiles * 3 / 4, plan.order.heads);
    const std::int64_t live = plan.order.together * ceil_div(plan.order.blocks, plan.order.stagger);
    EXPECT_GE(live, wanted) << D << " " << N << (causal ? " causal" : " full");
  };
  for (const std::int64_t N : {512, 1024, 2048, 4096, 8192, 16384})
    for (const std::int64_t D : {64, 128})
      for (const bool causal : {false, true})
        if (D == 128 || !causal || N >= 1024) expect(D, N, causal);
}

TEST(WorkOrder, RuleByExample) {
  const auto row = [](const WorkOrder& o) { return std::vector<Int32>{o.heads, o.blocks, o.together, o.stagger}; };
  using Row = std::vector<Int32>;
  EXPECT_EQ(row(backward(128, 8192, false, true).order), (Row{32, 64, 2, 64}));     // 3 would leave a section of 2
  EXPECT_EQ(row(backward(128, 512, false, true).order), (Row{512, 4, 16, 4}));      // never more than 16 need
  EXPECT_EQ(row(backward(128, 16384, true, false).order), (Row{16, 128, 2, 128}));  // two, though one is too large
  EXPECT_EQ(row(backward(64, 4096, true, false).order), (Row{128, 32, 8, 32}));
  EXPECT_EQ(row(backward(64, 4096, true, true).order), (Row{128, 32, 1, 2}));  // 17 heads, in different phases
  EXPECT_EQ(row(backward(64, 1024, true, true).order), (Row{512, 8, 9, 1}));   // more heads than blocks: in groups
  // Tiles shorter than blocks: groups that fill the grid, three of them in different phases.
  EXPECT_EQ(row(backward(128, 16384, true, true).order), (Row{16, 128, 1, 43}));
  EXPECT_EQ(row(backward(128, 4096, true, true).order), (Row{64, 32, 4, 11}));
  EXPECT_EQ(row(backward(128, 512, true, true).order), (Row{512, 4, 33, 2}));
  // Whole sequences: short ones with at least 16 heads, with 8 where query heads share keys.
  EXPECT_EQ(row(backward(64, 512, true, true).order), (Row{1024, 4, 32, 4}));
  EXPECT_EQ(row(backward(64, 4096, true, true, 4).order), (Row{64, 32, 16, 32}));
  EXPECT_EQ(row(backward(128, 4096, true, true, 4).order), (Row{32, 32, 8, 32}));
  Problem packed = point(Pass::backward, 128, 4096, true);
  packed.packed = true;
  const WorkOrder order = plan_one_pass(packed, h200()).order;
  EXPECT_EQ(order.together, order.heads);
  EXPECT_EQ(order.stagger, order.blocks);
}

TEST(WorkOrder, AnUnknownCacheIsSmall) {
  cuda::Target target = h200();
  EXPECT_EQ(gpu::heads_in_cache(target, (60 << 20) / 5), 2);
  target.l2_bytes = 0;
  EXPECT_EQ(gpu::heads_in_cache(target, 1), 1);
  Problem p = point(Pass::backward, 128, 8192, false);
  p.options.deterministic = false;
  EXPECT_EQ(plan_one_pass(p, target).order.together, 2);
}

// Forward, full masks: K and V of a section are within the cache.
TEST(WorkOrder, ForwardSections) {
  for (const std::int64_t D : {64, 128, 256})
    for (const std::int64_t N : {512, 1024, 2048, 4096, 8192, 16384}) {
      const ForwardPlan plan = plan_forward(point(Pass::forward, D, N, false), h200());
      EXPECT_LE(plan.section * N * D * 4, h200().l2_bytes * 2 / 5) << D << " " << N;
      EXPECT_LE(plan.section, 16);
    }
}

}  // namespace
}  // namespace tessera::sm90
