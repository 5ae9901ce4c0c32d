// SPDX-License-Identifier: Apache-2.0
// Where things lie on a GPU. Which block of a kernel's grid has which rows (gpu/params.hpp): every row of every
// sequence has one block, whatever precedes, separates or follows the sequences; where cu_seqlens make no sense, a
// sequence has all of its blocks or none.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "api/units.hpp"
#include "core/check.hpp"
#include "cuda/jit/compile.hpp"
#include "gpu/params.hpp"
#include "ladder/ladder.hpp"

namespace tessera::ladder {
namespace {

struct Lengths {
  std::vector<Int32> entries;
  Int64 N = 0;
  Int32 B() const { return Int32(entries.size()) - 1; }
  LengthRef ref() const { return {entries.data(), 1}; }
};

Int64 between(std::mt19937& random, Int64 least, Int64 most) {
  return least + Int64(random() % UInt64(most - least + 1));
}

// Sequences in a row, many of them empty, with rows before and behind them.
Lengths sensible(std::mt19937& random) {
  Lengths out;
  out.entries.push_back(random() % 2 ? Int32(between(random, 0, 600)) : 0);
  for (Int64 b = between(random, 1, 12); b > 0; --b)
    out.entries.push_back(out.entries.back() + (random() % 3 ? Int32(between(random, 0, 400)) : 0));
  out.N = out.entries.back() + between(random, 0, 300);
  return out;
}

// The blocks of each sequence, by the first row of each.
std::map<Int32, std::set<Int64>> blocks_of(const Lengths& x, Int64 rows) {
  std::map<Int32, std::set<Int64>> found;
  for (Int64 n = 0; n < block_count(true, x.N, rows, x.B()); ++n) {
    const BlockPlace at = place_of(n, rows, x.B(), x.N, x.ref());
    EXPECT_GE(at.first, 0);
    EXPECT_TRUE(at.b >= 0 && at.b < x.B());
    if (at.first < packed_rows(x.ref(), at.b, x.N).size()) {
      const bool first_time = found[at.b].insert(at.first).second;
      EXPECT_TRUE(first_time) << "two blocks have row " << at.first << " of sequence " << at.b;
    }
  }
  return found;
}

std::set<Int64> all_blocks(Int64 length, Int64 rows) {
  std::set<Int64> out;
  for (Int64 first = 0; first < length; first += rows) out.insert(first);
  return out;
}

TEST(Places, EveryRowHasOneBlock) {
  std::mt19937 random(1);
  int late = 0;
  for (int round = 0; round < 2000; ++round) {
    const Lengths x = sensible(random);
    const Int64 rows = Int64(1) << between(random, 0, 8);
    late += x.entries[0] >= rows;
    const auto found = blocks_of(x, rows);
    for (Int32 b = 0; b < x.B(); ++b) {
      const auto at = std::size_t(b);
      const Int64 length = x.entries[at + 1] - x.entries[at];
      ASSERT_EQ(packed_rows(x.ref(), b, x.N).begin, x.entries[at]);
      ASSERT_EQ(packed_rows(x.ref(), b, x.N).size(), length);
      ASSERT_EQ(found.contains(b) ? found.at(b) : std::set<Int64>{}, all_blocks(length, rows));
      ASSERT_TRUE(finds_blocks(b, rows, x.B(), x.N, x.ref()));
    }
  }
  EXPECT_GT(late, 500);  // else no number lay before the first sequence
}

TEST(Places, OneSenselessEntryLeavesTheOtherSequencesAlone) {
  std::mt19937 random(4);
  int others = 0;
  for (int round = 0; round < 5000; ++round) {
    Lengths x = sensible(random);
    const auto entry = random() % x.entries.size();
    const Int64 before = entry > 0 ? x.entries[entry - 1] : 0;
    const Int64 senseless[] = {between(random, -500, -1), between(random, x.N + 1, x.N + 500), before - 1, 2147483647};
    x.entries[entry] = Int32(senseless[random() % 4]);
    const Int64 rows = Int64(1) << between(random, 0, 8);
    const auto found = blocks_of(x, rows);
    for (std::size_t b = 0; b + 1 < x.entries.size(); ++b) {
      const bool concerned = b == entry || b + 1 == entry;
      const Int64 length = concerned ? 0 : x.entries[b + 1] - x.entries[b];
      ASSERT_EQ(packed_rows(x.ref(), Int32(b), x.N).size(), length);
      ASSERT_EQ(found.contains(Int32(b)) ? found.at(Int32(b)) : std::set<Int64>{}, all_blocks(length, rows));
      others += length > 0;
    }
  }
  EXPECT_GT(others, 5000);
}

TEST(Places, SenselessLengthsGiveASequenceAllOfItsBlocksOrNone) {
  std::mt19937 random(2);
  int none = 0, all = 0;
  for (int round = 0; round < 5000; ++round) {
    Lengths x = sensible(random);
    do {
      constexpr Int32 extremes[] = {-1, -2147483647 - 1, 2147483647};
      x.entries[random() % x.entries.size()] =
          random() % 3 ? Int32(between(random, -300, x.N + 300)) : extremes[random() % 3];
    } while (random() % 2);
    const Int64 rows = Int64(1) << between(random, 4, 8);
    const auto found = blocks_of(x, rows);
    for (Int32 b = 0; b < x.B(); ++b) {
      const Range tokens = packed_rows(x.ref(), b, x.N);
      ASSERT_TRUE(0 <= tokens.begin && tokens.begin <= tokens.end && tokens.end <= x.N);
      if (tokens.empty()) continue;
      const bool has_some = found.contains(b);
      (has_some ? all : none) += 1;
      ASSERT_EQ(has_some, finds_blocks(b, rows, x.B(), x.N, x.ref()));
      if (has_some) {
        ASSERT_EQ(found.at(b), all_blocks(tokens.size(), rows));
      }
    }
  }
  EXPECT_GT(none, 500);
  EXPECT_GT(all, 1000);
}

// Tiles of sums are numbered in the same way: no two sequences that are found share a number.
TEST(Places, NumbersOfSequencesThatAreFoundDiffer) {
  std::mt19937 random(3);
  for (int round = 0; round < 3000; ++round) {
    Lengths x = sensible(random);
    for (int n = 0; n < round % 3; ++n) x.entries[random() % x.entries.size()] = Int32(between(random, 0, x.N));
    const Int64 rows = 64, count = block_count(true, x.N, rows, x.B());
    std::set<Int64> taken;
    for (Int32 b = 0; b < x.B(); ++b) {
      if (!finds_blocks(b, rows, x.B(), x.N, x.ref())) continue;
      const Int64 blocks = ceil_div(packed_rows(x.ref(), b, x.N).size(), rows);
      for (Int64 n = 0; n < blocks; ++n) {
        const Int64 number = first_block(x.ref(), b, rows, x.N) + n;
        ASSERT_LT(number, count);
        ASSERT_TRUE(taken.insert(number).second);
      }
    }
  }
}

TEST(Places, NoSequencesHaveNoBlocks) {
  const Lengths x{.entries = {5}, .N = 1000};
  EXPECT_EQ(block_count(true, x.N, 64, x.B()), 0);
  EXPECT_EQ(block_count(false, x.N, 64, 0), 0);
}

// Bias and mask of packed input are as large as the caller made them: longer sequences are cut.
TEST(Places, LengthsStayInsideBiasAndMask) {
  const Lengths lengths{.entries = {0, 100, 160}, .N = 200};
  Question x{};
  x.B = 2, x.Nq = x.Nk = 200, x.window_left = x.window_right = -1;
  x.cu_seqlens_q = x.cu_seqlens_k = lengths.ref();
  x.most_queries = 90, x.most_keys = 70;
  EXPECT_EQ(sequence_of(x, 0).nq, 90);
  EXPECT_EQ(sequence_of(x, 0).nk, 70);
  EXPECT_EQ(sequence_of(x, 1).nq, 60);
  EXPECT_EQ(sequence_of(x, 1).nk, 60);
}

// --- alignment: it decides about loads, and not about tiles, whose order of sums makes the bits

std::vector<Problem> problems_of_all_kinds() {
  std::vector<Problem> all;
  for (const Pass pass : {Pass::forward, Pass::backward})
    for (const Type type : {Type::f32, Type::f16, Type::bf16})
      for (const std::int64_t D : {1, 40, 64, 84, 96, 128, 160, 192, 256, 512})
        for (unsigned options = 0; options < 32; ++options) {
          Problem p = api::plain_problem(pass, type, {D, std::min<std::int64_t>(D, 512)});
          if (options & 1) p.options.softcap = 5;
          if (options & 2) p.slopes = 1;
          if (options & 4) p.mask = Broadcast{Type::u8, {1, 1, p.Nq, p.Nk}};
          if (options & 8) p.options.dropout = 0.5;
          if (options & 16) p.bias = Broadcast{type, {1, 1, p.Nq, p.Nk}};
          all.push_back(p);
        }
  return all;
}

TEST(Alignment, DoesNotChangeTiles) {
  int wide = 0;
  for (const char* architecture : {"sm_75", "sm_80", "sm_86", "sm_90a"})
    for (Problem p : problems_of_all_kinds())
      for (const Algorithm& rung : algorithms()) {
        const cuda::Target target = cuda::target_named(architecture);
        p.alignment = 16;
        const Steps aligned = rung.plan(p, target);
        p.alignment = static_cast<int>(p.q_type == Type::f32 ? 4 : 2);
        Steps other = rung.plan(p, target);
        ASSERT_EQ(aligned.reason, other.reason);
        ASSERT_EQ(aligned.list.size(), other.list.size());
        for (std::size_t n = 0; n < other.list.size(); ++n) {
          const Step &a = aligned.list[n], &b = other.list[n];
          const std::string narrow = "wide_loads = false", wide_loads = "wide_loads = true";
          std::string same = a.unit;
          if (const std::size_t at = same.find(wide_loads); at != std::string::npos)
            same.replace(at, wide_loads.size(), narrow), ++wide;
          ASSERT_EQ(same, b.unit) << rung.name << " " << architecture << " D=" << p.D;
          ASSERT_EQ(a.blocks, b.blocks);
        }
      }
  EXPECT_GT(wide, 1000);
}

TEST(Alignment, OfOutputsIsNoPartOfTheProblem) {
  std::vector<float> memory(4 * 8 * 2 * 16 + 8);
  const auto at = [&](std::size_t shift) { return Tensor(memory.data() + shift, Type::f32, {4, 8, 2, 16}); };
  const std::size_t whole = (16 - reinterpret_cast<std::uintptr_t>(memory.data()) % 16) / 4 % 4;
  const Tensor in = at(whole), out = at(whole + 1), lse(memory.data(), Type::f32, {4, 2, 8});
  Inputs inputs;
  inputs.q = inputs.k = inputs.v = in;
  EXPECT_EQ(check_forward(inputs, {.o = out, .lse = {}}, {}, {}).alignment, 16);
  const Gradients gradients{.dq = out, .dk = out, .dv = out, .dbias = {}, .dsinks = {}};
  const Saved saved{.o = in, .lse = lse, .d_o = in, .d_lse = {}};
  EXPECT_EQ(check_backward(inputs, saved, gradients, {}, {}).alignment, 16);
  inputs.k = out;
  EXPECT_EQ(check_forward(inputs, {.o = in, .lse = {}}, {}, {}).alignment, 4);
}

// The compiler would contract products and sums in one variant of a kernel and not in another.
TEST(Alignment, CompilerContractsNothing) {
  const std::vector<std::string>& flags = cuda::compile_flags();
  EXPECT_NE(std::find(flags.begin(), flags.end(), "--fmad=false"), flags.end());
}

}  // namespace
}  // namespace tessera::ladder
