// SPDX-License-Identifier: Apache-2.0
// Partitions and schedules without a network: thousands of random packings against the checker, and the checker
// against schedules with one deliberate fault each. Implements docs/scale_out.md, "Schedules".
#include "dist/schedule.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
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
  s.settings.grain = random.number(1, 3) * (scale / 40) * 4;
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
      const Schedule s =
          make_schedule(lengths, {.causal = true}, zigzag(lengths, ranks, 128), {.scheme = scheme, .grain = 128});
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

// Of the largest that are allowed: products of them do not fit in 64 bits.
TEST(Partition, LargeNumbersAreCutAsSmallOnes) {
  constexpr Int64 most = Int64(1) << 48;
  constexpr int ranks = 1 << 16;
  const Partition rows = contiguous({most}, ranks, 1);
  for (const int r : {0, 1, ranks - 2, ranks - 1}) EXPECT_EQ(rows.rows(r), most / ranks) << r;
  const Partition whole = balanced({5}, {}, ranks, most);
  Int64 held = 0;
  for (int r = 0; r < ranks; ++r) held = greater(held, whole.rows(r));
  EXPECT_EQ(held, 5);
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
// 0 to 6; rank 1 holds 1 and 5. All pieces are too small to be dealt out.
Schedule small(Scheme scheme, Pass pass = Pass::backward, int slices = 1) {
  const std::vector<Int64> lengths{64};
  return make_schedule(lengths, {.causal = true}, two_level(zigzag(lengths, 4, 8), slices, 1),
                       {.scheme = scheme, .pass = pass, .grain = 8});
}

// The same with chunks of 128 rows, which are dealt in parts of 64: who needs a piece passes a part of it on.
Schedule dealt(Pass pass = Pass::backward) {
  const std::vector<Int64> lengths{1024};
  return make_schedule(lengths, {.causal = true}, zigzag(lengths, 4, 128), {.pass = pass, .grain = 128});
}

std::string judged(const Schedule& s) { return check_schedule(s, 8).fault; }

Transfer& transfer(Schedule& s, std::size_t rank, What what, bool send) {
  for (Step& step : s.of[rank].steps)
    for (Transfer& t : step.group)
      if (t.what == what && t.send == send) return t;
  throw std::out_of_range("no such transfer");
}

// The first step with work, and the last.
std::size_t first_work(const Schedule& s, std::size_t rank) {
  std::size_t t = 0;
  while (s.of[rank].steps.at(t).work.empty()) ++t;
  return t;
}
std::size_t last_work(const Schedule& s, std::size_t rank) {
  std::size_t t = s.of[rank].steps.size() - 1;
  while (s.of[rank].steps.at(t).work.empty()) --t;
  return t;
}

// Moves the transfers of a kind, at both ends, by some steps.
void shift(Schedule& s, int by, const std::function<bool(const Transfer&, std::size_t rank)>& which) {
  for (std::size_t r = 0; r < s.of.size(); ++r) {
    std::vector<std::pair<std::size_t, Transfer>> moved;
    std::vector<Step>& steps = s.of[r].steps;
    for (std::size_t t = 0; t < steps.size(); ++t)
      std::erase_if(steps[t].group, [&](const Transfer& x) {
        const bool it = which(x, r);
        if (it) moved.push_back({static_cast<std::size_t>(static_cast<int>(t) + by), x});
        return it;
      });
    for (const auto& [t, x] : moved) steps.at(t).group.push_back(x);
  }
}

TEST(Checker, NoticesWorkThatIsMissingDoubledOrForeign) {
  Schedule s = small(Scheme::gather);
  ASSERT_EQ(judged(s), "");
  std::vector<Work>& work = s.of[1].steps[first_work(s, 1)].work;
  const std::vector<Work> right = work;
  work.pop_back();
  EXPECT_EQ(judged(s), "rank 1: query 48 of sequence 0 never sees key 0");
  work = right, work.push_back(right.back());
  EXPECT_EQ(judged(s), "rank 1: piece 5 sees key 0 twice");
  work = right, work[0].query = 2;
  EXPECT_EQ(judged(s), "rank 1, step 2: works on queries of piece 2, which node 2 holds");
}

TEST(Checker, NoticesWorkOnWhatIsNotThere) {
  Schedule s = small(Scheme::gather);
  const std::size_t t = first_work(s, 1);
  s.of[1].steps[t].work[0].at += 1;
  EXPECT_EQ(judged(s), "rank 1, step 2: works on key 0 of sequence 0 in row 1, which does not hold it");
  s = small(Scheme::gather);
  std::swap(s.of[1].steps[t - 1].work, s.of[1].steps[t].work);  // its keys are still under way
  EXPECT_EQ(judged(s), "rank 1, step 1: works on key 0 of sequence 0 in row 0, which does not hold it");
  s = small(Scheme::gather);
  s.of[1].steps[t].work[0] = {1, {48, 56}, s.of[1].home[1]};
  EXPECT_EQ(judged(s), "rank 1, step 2: piece 1 sees nothing of keys 48 to 56");
  s = small(Scheme::gather);
  s.of[1].steps[t].work[0].at = 1000;
  EXPECT_EQ(judged(s), "rank 1: rows 1000 to 1008 are outside of its memory for 56");
}

// What a node passes on must have been dealt to it, two steps before.
TEST(Checker, NoticesKeysThatArePassedOnTooEarly) {
  Schedule s = dealt();
  ASSERT_EQ(judged(s), "");
  const auto is_dealt = [&](const Transfer& x, std::size_t rank) {
    const int from = x.send ? static_cast<int>(rank) : x.peer;
    return x.what == What::keys && s.pieces[static_cast<std::size_t>(piece_at(s, 0, x.rows.begin))].node == from;
  };
  int passed_on = 0;
  for (std::size_t r = 0; r < 4; ++r)
    for (std::size_t t = 0; t < s.of[r].steps.size(); ++t)
      for (const Transfer x : std::vector<Transfer>(s.of[r].steps[t].group)) {
        if (x.what != What::keys || !x.send || is_dealt(x, r)) continue;
        ++passed_on;
        Schedule late = s;
        shift(late, static_cast<int>(t) - 1, [&](const Transfer& y, std::size_t rank) {  // at least one step too late
          return is_dealt(y, rank) && y.rows.begin <= x.rows.begin && x.rows.end <= y.rows.end &&
                 (y.send ? y.peer : static_cast<int>(rank)) == static_cast<int>(r);
        });
        EXPECT_NE(judged(late).find(", which does not hold it"), std::string::npos) << judged(late);
      }
  EXPECT_GT(passed_on, 10);
}

TEST(Checker, NoticesKeysOutOfOrder) {
  Schedule s = small(Scheme::gather);
  std::vector<Work>& work = s.of[0].steps[last_work(s, 0)].work;
  const Work all = work.at(0);  // piece 6 with its last keys
  ASSERT_EQ(all.query, 6);
  const Int64 middle = (all.keys.begin + all.keys.end) / 2;
  work = {{6, {middle, all.keys.end}, all.at + middle - all.keys.begin}, {6, {all.keys.begin, middle}, all.at}};
  EXPECT_NE(judged(s).find(", against the order of keys"), std::string::npos) << judged(s);
  std::swap(work[0], work[1]);
  EXPECT_EQ(judged(s), "");
}

TEST(Checker, NoticesTransfersThatDoNotMatch) {
  Schedule s = small(Scheme::ring);
  transfer(s, 2, What::keys, true).rows.end -= 1;
  EXPECT_EQ(judged(s), "step 0: what rank 2 sends to rank 3 is not what that one receives");
  s = small(Scheme::ring);
  transfer(s, 2, What::keys, false).peer = 2;
  EXPECT_EQ(judged(s), "rank 2, step 0: there is no peer 2");
  s = small(Scheme::ring);
  s.of[3].steps.pop_back();
  EXPECT_EQ(judged(s), "rank 3 has 4 steps, rank 0 has 5");
}

TEST(Checker, NoticesMemoryOverwrittenInUse) {
  Schedule s = small(Scheme::ring);
  transfer(s, 1, What::keys, false).at = 0;  // lands on the rank's own keys, which step 0 works on
  EXPECT_EQ(judged(s), "rank 1, step 0: row 0 is overwritten in use");
  s = make_schedule({64}, {}, zigzag({64}, 4, 8), {.scheme = Scheme::ring});  // everybody sees two pieces of rank 0
  std::vector<Transfer*> both;
  for (Transfer& x : s.of[1].steps[0].group)
    if (!x.send) both.push_back(&x);
  ASSERT_EQ(both.size(), 2u);
  both[1]->at = both[0]->at;
  EXPECT_EQ(judged(s), "rank 1, step 0: two pieces arrive in row 32");
  s = small(Scheme::ring);
  s.of[1].slot_rows -= 1;
  EXPECT_NE(judged(s).find("are outside of its memory for"), std::string::npos) << judged(s);
  // Two sets are too few where two groups may be under way beside the work.
  s = make_schedule({64}, {}, zigzag({64}, 4, 8), {.scheme = Scheme::ring});
  ASSERT_EQ(judged(s), "");
  s.ahead = 2;
  EXPECT_NE(judged(s), "");
}

TEST(Checker, NoticesGradientsThatAreLostOrEarly) {
  Schedule s = small(Scheme::gather);
  const auto gone = [](std::vector<Step>& steps, bool send) {
    for (Step& step : steps)
      std::erase_if(step.group, [&](const Transfer& t) {
        return t.what == What::gradients && t.send == send && t.rows.begin == 0;
      });
  };
  for (RankSchedule& rank : s.of)
    for (const bool send : {true, false}) gone(rank.steps, send);
  EXPECT_EQ(judged(s), "rank 1: never returns the gradients of key 0 of sequence 0");
  s = small(Scheme::gather);
  shift(s, -1, [](const Transfer& x, std::size_t) { return x.what == What::gradients && x.rows.begin == 0; });
  EXPECT_EQ(judged(s), "rank 1, step 2: returns gradients of key 0 of sequence 0 before its last work");
  s = small(Scheme::gather);
  s.settings.pass = Pass::forward;
  EXPECT_NE(judged(s).find("gradients in a forward pass"), std::string::npos) << judged(s);
  s = small(Scheme::gather);
  for (RankSchedule& rank : s.of)
    for (Step& step : rank.steps)
      for (std::size_t i = step.group.size(); i-- > 0;)
        if (step.group[i].what == What::gradients && step.group[i].rows.begin == 0)
          step.group.push_back(Transfer(step.group[i]));
  EXPECT_EQ(judged(s), "rank 1: returns gradients of key 0 of sequence 0 for piece 1 twice");
}

// A sum leaves once, for the node that holds the rows, when all shares have arrived.
TEST(Checker, NoticesSumsThatAreLostIncompleteOrAstray) {
  const auto is_sum = [](const Transfer& x, std::size_t) { return x.what == What::sums; };
  Schedule s = dealt();
  shift(s, -1, is_sum);
  EXPECT_NE(judged(s).find("before all shares are there"), std::string::npos) << judged(s);
  s = dealt();
  for (RankSchedule& rank : s.of)
    for (Step& step : rank.steps) std::erase_if(step.group, [&](const Transfer& x) { return is_sum(x, 0); });
  EXPECT_NE(judged(s).find("never returns the gradients of key "), std::string::npos) << judged(s);
  s = dealt();
  for (RankSchedule& rank : s.of)
    for (Step& step : rank.steps)
      for (std::size_t i = step.group.size(); i-- > 0;)
        if (is_sum(step.group[i], 0)) step.group.push_back(Transfer(step.group[i]));
  EXPECT_NE(judged(s).find("sum of key "), std::string::npos) << judged(s);
  EXPECT_NE(judged(s).find(" twice"), std::string::npos) << judged(s);
  // Astray: to another rank than the one that holds the rows.
  s = dealt();
  Transfer& sent = transfer(s, 1, What::sums, true);
  const int right = sent.peer, wrong = right == 2 ? 3 : 2;
  const Span rows = sent.rows;
  for (std::size_t t = 0; t < s.of[0].steps.size(); ++t) {
    std::vector<Transfer>& group = s.of[static_cast<std::size_t>(right)].steps[t].group;
    for (std::size_t i = 0; i < group.size(); ++i)
      if (is_sum(group[i], 0) && !group[i].send && group[i].rows == rows) {
        Transfer moved = group[i];
        group.erase(group.begin() + static_cast<std::ptrdiff_t>(i));
        moved.at = 0;
        s.of[static_cast<std::size_t>(wrong)].steps[t].group.push_back(moved);
        break;
      }
  }
  sent.peer = wrong;
  EXPECT_NE(judged(s).find(", which does not hold it"), std::string::npos) << judged(s);
  EXPECT_NE(judged(s).find("sends the sum of key "), std::string::npos) << judged(s);
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
  s = small(Scheme::gather);
  s.of[2].home.pop_back();
  EXPECT_EQ(judged(s), "rank 2: has places for 1 of its 2 spans");
}

TEST(Checker, NoticesHeadsThatAreNotExchanged) {
  Schedule s = small(Scheme::gather, Pass::forward, 2);
  EXPECT_EQ(judged(s), "");
  for (RankSchedule& rank : s.of) rank.steps.pop_back();
  EXPECT_EQ(judged(s), "rank 0: exchanges results with rank 1 not once");
  s = small(Scheme::gather, Pass::forward, 2);
  for (RankSchedule& rank : s.of) std::swap(rank.steps[0], rank.steps[1]);
  EXPECT_NE(judged(s).find("out of place"), std::string::npos) << judged(s);
  s = small(Scheme::gather, Pass::forward, 2);
  for (RankSchedule& rank : s.of) rank.steps.erase(rank.steps.begin() + 1);  // keys leave while heads are under way
  EXPECT_NE(judged(s), "");
}

}  // namespace
}  // namespace tessera::dist
