// SPDX-License-Identifier: Apache-2.0
// Partitions and schedules without a network: thousands of random packings against the checker, and the checker
// against schedules with one deliberate fault each. Implements docs/scale_out.md, "Schedules".
#include "dist/schedule.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

#include "tessera/tessera.hpp"

namespace tessera::dist {
namespace {

struct Sample {
  std::vector<Int64> lengths;
  Mask mask;
  Partition partition;
  Settings settings;
  std::string text;
};

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine(seed) {}
  Int64 number(Int64 low, Int64 high) { return std::uniform_int_distribution<Int64>(low, high)(engine); }
  bool chance(int percent) { return number(1, 100) <= percent; }

 private:
  std::mt19937_64 engine;
};

Mask random_mask(Random& random, Int64 longest) {
  Mask mask{.causal = random.chance(60)};
  if (random.chance(30)) mask.left = random.number(0, longest);
  if (random.chance(20)) mask.right = random.number(0, longest);
  if (random.chance(10)) mask.offset = random.number(-longest, longest);
  return mask;
}

// Lengths that are divisible by nothing, empty sequences, more ranks than rows.
Sample random_sample(std::uint64_t seed, Int64 most_ranks) {
  Random random(seed);
  Sample s;
  const Int64 count = random.number(0, 6), scale = random.chance(50) ? 40 : 700;
  for (Int64 b = 0; b < count; ++b) s.lengths.push_back(random.chance(20) ? 0 : random.number(1, scale));
  s.mask = random_mask(random, scale);
  const Int64 align = random.number(1, 3) * (scale / 40) * 4 - random.number(0, 3);
  const int ranks = static_cast<int>(random.number(1, most_ranks));
  const int slices = random.chance(25) ? static_cast<int>(random.number(2, 4)) : 1;
  const char* kind = "contiguous";
  if (random.chance(35))
    s.partition = zigzag(s.lengths, ranks, align), kind = "zigzag";
  else if (random.chance(50))
    s.partition = balanced(s.lengths, s.mask, ranks, align), kind = "balanced";
  else
    s.partition = contiguous(s.lengths, ranks, align);
  s.partition = two_level(s.partition, slices, random.number(1, 16));
  s.settings = {.scheme = random.chance(50) ? Scheme::ring : Scheme::gather,
                .pass = random.chance(50) ? Pass::forward : Pass::backward};
  if (s.settings.scheme == Scheme::gather && align * 32 >= scale && random.chance(50)) s.settings.segment = align;
  s.text = std::string(kind) + ", seed " + std::to_string(seed) + ", " + std::to_string(ranks) + " nodes of " +
           std::to_string(slices);
  return s;
}

Schedule schedule_of(const Sample& s) { return make_schedule(s.lengths, s.mask, s.partition, s.settings); }

TEST(Schedule, TenThousandRandomPackings) {
  for (std::uint64_t seed = 1; seed <= 10000; ++seed) {
    const Sample s = random_sample(seed, seed % 100 == 0 ? 512 : seed % 10 == 0 ? 48 : 8);
    const Judgement judgement = check_schedule(schedule_of(s), 16);
    ASSERT_EQ(judgement.fault, "") << s.text;
  }
}

TEST(Schedule, ZigzagBalancesACausalMaskOnAnyNumberOfRanks) {
  for (const int ranks : {2, 3, 4, 8, 64, 512})
    for (const Scheme scheme : {Scheme::ring, Scheme::gather}) {
      const std::vector<Int64> lengths{Int64(2 * ranks) * 128};
      const Schedule s = make_schedule(lengths, {.causal = true}, zigzag(lengths, ranks, 128), {.scheme = scheme});
      const Judgement judgement = check_schedule(s, 128);
      EXPECT_EQ(judgement.fault, "");
      EXPECT_GE(judgement.balance, 0.99) << ranks;
    }
}

double largest_block(const std::vector<Int64>& lengths, const Mask& mask, Int64 align) {
  double most = 0;
  for (const Int64 length : lengths)
    for (Int64 at = 0; at < length; at += align)
      most = std::max(most, visible_pairs(mask.band(length), at, lesser(at + align, length)));
  return most;
}

TEST(Partition, BalancedIsWithinOneBlockRow) {
  int roomy = 0;
  for (std::uint64_t seed = 1; seed <= 2000; ++seed) {
    Random random(seed);
    std::vector<Int64> lengths;
    for (Int64 b = random.number(1, 30); b > 0; --b)
      lengths.push_back(random.number(0, random.chance(10) ? 20000 : 1500));
    const Mask mask = random_mask(random, 4000);
    const int ranks = static_cast<int>(random.number(1, 16));
    const Partition p = balanced(lengths, mask, ranks, 128);
    double total = 0, most = 0;
    for (const std::vector<Span>& spans : p.of) {
      double work = 0;
      for (const Span& s : spans)
        work += visible_pairs(mask.band(lengths[static_cast<std::size_t>(s.sequence)]), s.begin, s.end);
      total += work, most = std::max(most, work);
    }
    const double block = largest_block(lengths, mask, 128);
    ASSERT_LE(most, total / ranks + block * 1.000001) << seed;
    if (total == 0 || total / ranks < 20 * block) continue;
    ASSERT_GE(total / ranks / most, 0.95) << seed;
    ++roomy;
  }
  EXPECT_GT(roomy, 100);
}

TEST(Partition, VisiblePairsAreCountedAsVisibleSays) {
  Random random(3);
  for (int n = 0; n < 2000; ++n) {
    const Int64 length = random.number(1, 40), begin = random.number(0, length), end = random.number(begin, length);
    const BandMask band = random_mask(random, 50).band(length);
    double count = 0;
    for (Int64 i = begin; i < end; ++i)
      for (Int64 j = 0; j < length; ++j) count += band.visible(i, j);
    ASSERT_EQ(visible_pairs(band, begin, end), count) << n;
  }
}

TEST(Partition, NoRowsAndNoSequences) {
  for (const std::vector<Int64>& lengths : {std::vector<Int64>{}, std::vector<Int64>{0, 0}, std::vector<Int64>{1}}) {
    for (const Partition& p : {contiguous(lengths, 3, 8), zigzag(lengths, 3, 8), balanced(lengths, {}, 3, 8)}) {
      ASSERT_EQ(p.ranks(), 3);
      const Schedule s = make_schedule(lengths, {}, p, {.pass = Pass::backward});
      EXPECT_EQ(check_schedule(s, 8).fault, "");
    }
  }
}

TEST(Schedule, SegmentsMustFitThePartition) {
  try {
    make_schedule({100}, {}, contiguous({100}, 3, 1), {.segment = 16});
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(
        error.what(),
        "segment: is 16; rows 0 to 33 of sequence 0 must begin and end on multiples of it, or with the sequence");
    EXPECT_EQ(error.status(), TESSERA_INVALID_ARGUMENT);
  }
}

// One sequence of 64 rows, causal, on 4 ranks: 8 chunks of 8 rows, of which rank 3 holds two neighbours, so pieces
// 0 to 6; rank 1 holds 1 and 5.
Schedule small(Scheme scheme, Pass pass = Pass::backward, int slices = 1) {
  const std::vector<Int64> lengths{64};
  return make_schedule(lengths, {.causal = true}, two_level(zigzag(lengths, 4, 8), slices, 1),
                       {.scheme = scheme, .pass = pass});
}

std::string judged(const Schedule& s) { return check_schedule(s, 8).fault; }

Transfer& transfer(Schedule& s, std::size_t rank, What what, bool send) {
  for (Step& step : s.of[rank].steps)
    for (Transfer& t : step.group)
      if (t.what == what && t.send == send) return t;
  throw std::out_of_range("no such transfer");
}

TEST(Checker, NoticesWorkThatIsMissingDoubledOrForeign) {
  Schedule s = small(Scheme::gather);
  std::vector<Work>& work = s.of[1].steps[1].work;
  const std::vector<Work> right = work;
  work.pop_back();
  EXPECT_EQ(judged(s), "rank 1: query 48 of sequence 0 never sees key 0");
  work = right, work.push_back(right.back());
  EXPECT_EQ(judged(s), "rank 1: piece 5 sees key 0 twice");
  work = right, work[0].query = 2;
  EXPECT_EQ(judged(s), "rank 1, step 1: works on queries of piece 2, which node 2 holds");
}

TEST(Checker, NoticesWorkOnWhatIsNotThere) {
  Schedule s = small(Scheme::gather);
  s.of[1].steps[1].work[0].slot = 1;
  EXPECT_EQ(judged(s), "rank 1, step 1: works on piece 0 in slot 1, which does not hold it");
  s = small(Scheme::gather);
  s.of[1].steps[0].work = s.of[1].steps[1].work;
  EXPECT_EQ(judged(s), "rank 1, step 0: works on piece 0 in slot 2, which does not hold it");
  s = small(Scheme::gather);
  s.of[1].steps[1].work[0] = {1, 5, 1};
  EXPECT_EQ(judged(s), "rank 1, step 1: piece 1 sees nothing of piece 5");
}

TEST(Checker, NoticesKeysOutOfOrder) {
  Schedule s = small(Scheme::gather);
  std::vector<Work>& work = s.of[0].steps[3].work;  // piece 6 with pieces 2 and 3
  std::swap(work.at(0), work.at(1));
  EXPECT_EQ(judged(s), "rank 0, step 3: piece 6 sees piece 2 after 3, against the order of keys");
}

TEST(Checker, NoticesTransfersThatDoNotMatch) {
  Schedule s = small(Scheme::ring);
  transfer(s, 2, What::keys, true).piece = 5;
  EXPECT_EQ(judged(s), "step 0: what rank 2 sends to rank 3 is not what that one receives");
  s = small(Scheme::ring);
  transfer(s, 2, What::keys, false).peer = 2;
  EXPECT_EQ(judged(s), "rank 2, step 0: there is no peer 2");
  s = small(Scheme::ring);
  s.of[3].steps.pop_back();
  EXPECT_EQ(judged(s), "rank 3 has 4 steps, rank 0 has 5");
}

TEST(Checker, NoticesSlotsOverwrittenInUse) {
  Schedule s = small(Scheme::ring);
  s.of[1].slot_row[2] = s.of[1].slot_row[0];  // the first arrival lands on the rank's own keys, which step 0 works on
  EXPECT_EQ(judged(s), "rank 1, step 0: row 0 is overwritten in use");
  s = make_schedule({64}, {}, zigzag({64}, 4, 8), {.scheme = Scheme::ring});  // everybody sees two pieces of rank 0
  s.of[1].slot_row[6] = s.of[1].slot_row[2];
  EXPECT_EQ(judged(s), "rank 1, step 0: two pieces arrive in row 32");
  s = small(Scheme::ring);
  s.of[1].slot_rows -= 1;
  EXPECT_NE(judged(s).find("is too small for piece"), std::string::npos) << judged(s);
}

TEST(Checker, NoticesGradientsThatAreLostOrEarly) {
  Schedule s = small(Scheme::gather);
  const auto gone = [](std::vector<Step>& steps, bool send) {
    for (Step& step : steps)
      std::erase_if(step.group,
                    [&](const Transfer& t) { return t.what == What::gradients && t.send == send && t.piece == 0; });
  };
  for (RankSchedule& rank : s.of)
    for (const bool send : {true, false}) gone(rank.steps, send);
  EXPECT_EQ(judged(s), "rank 1: never returns the gradients of piece 0");
  s = small(Scheme::gather);
  for (RankSchedule& rank : s.of)
    for (std::size_t t = 1; t < rank.steps.size(); ++t) {
      rank.steps[t - 1].group.insert(rank.steps[t - 1].group.end(), rank.steps[t].group.begin(),
                                     rank.steps[t].group.end());
      rank.steps[t].group.clear();
    }
  EXPECT_NE(judged(s), "");
  s = small(Scheme::gather);
  s.settings.pass = Pass::forward;
  EXPECT_NE(judged(s).find("gradients in a forward pass"), std::string::npos) << judged(s);
}

TEST(Checker, NoticesRowsHeldTwiceOrByNobody) {
  Schedule s = small(Scheme::gather);
  s.partition.of[0][0].end = 7;
  EXPECT_EQ(judged(s), "the ranks hold row 7 of sequence 0 never");
  s.partition.of[0][0].end = 9;
  EXPECT_EQ(judged(s), "the ranks hold row 8 of sequence 0 twice");
  s = small(Scheme::gather);
  s.pieces.pop_back();
  EXPECT_EQ(judged(s), "the pieces hold row 56 of sequence 0 never");
}

TEST(Checker, NoticesHeadsThatAreNotExchanged) {
  Schedule s = small(Scheme::gather, Pass::forward, 2);
  EXPECT_EQ(judged(s), "");
  for (RankSchedule& rank : s.of) rank.steps.pop_back();
  EXPECT_EQ(judged(s), "rank 0: exchanges results with rank 1 not once");
  s = small(Scheme::gather, Pass::forward, 2);
  for (RankSchedule& rank : s.of) std::swap(rank.steps[0], rank.steps[1]);
  EXPECT_NE(judged(s).find("out of place"), std::string::npos) << judged(s);
}

}  // namespace
}  // namespace tessera::dist
