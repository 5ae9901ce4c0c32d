// SPDX-License-Identifier: Apache-2.0
// Attention over 1, 2, 3, 4 and 8 ranks, as threads: every scheme, both passes, against float64 and against one call of
// the library. An error is at most 1.02 times that of one device. Implements docs/scale_out.md, "Accuracy".
#include "dist/attention.hpp"

#include <gtest/gtest.h>

#include "tests/dist/world.hpp"

namespace tessera::dist {
namespace {

struct Row {
  const char* name;
  Problem problem;
  Features features{};
};

Problem problem(std::vector<Int64> lengths, Int64 Hq, Int64 Hk, Int64 D, Int64 Dv, Type type, Options options) {
  return {std::move(lengths), Hq, Hk, D, Dv, type, options};
}

const std::vector<Row>& table() {
  // 16-bit cases have several tiles of keys also on one device: see docs/scale_out.md, "Accuracy".
  static const std::vector<Row> rows = {
      {"causal f32", problem({420}, 4, 2, 32, 32, Type::f32, {.causal = true})},
      {"causal bf16, GQA 4", problem({1400}, 4, 1, 32, 48, Type::bf16, {.causal = true})},
      {"full f16", problem({901}, 2, 2, 24, 24, Type::f16, {})},
      {"window bf16, GQA 3", problem({1300}, 3, 1, 32, 32, Type::bf16, {.window_left = 700, .window_right = 300})},
      {"window f32", problem({500}, 6, 2, 32, 32, Type::f32, {.window_left = 70, .window_right = 20})},
      {"causal window f32, GQA 8", problem({512}, 8, 1, 16, 16, Type::f32, {.causal = true, .window_left = 100})},
      {"packed with empty documents", problem({130, 0, 57, 1, 300, 0}, 4, 2, 32, 32, Type::f32, {.causal = true})},
      {"packed, window", problem({90, 33, 256}, 2, 2, 64, 64, Type::f32, {.causal = true, .window_left = 40})},
      {"dropout", problem({260, 60}, 4, 2, 32, 32, Type::f32, {.causal = true, .dropout = 0.3, .seed = 9})},
      {"sinks and dLSE", problem({333}, 4, 2, 32, 32, Type::f32, {.causal = true}), {.sinks = true, .d_lse = true}},
      {"sinks in a window",
       problem({256, 64}, 4, 4, 16, 16, Type::f32, {.window_left = 8, .window_right = 8}),
       {.sinks = true}},
      {"bias and mask", problem({140, 77}, 4, 2, 16, 32, Type::f32, {.causal = true}), {.bias = true, .mask = true}},
      {"ALiBi and softcap", problem({280}, 4, 2, 32, 32, Type::f32, {.softcap = 5, .causal = true}), {.slopes = true}},
      {"rows that see no key", problem({200}, 2, 1, 16, 16, Type::f32,
                                       {.causal = true, .alignment = Alignment::offset, .diagonal_offset = -80})},
      {"fewer rows than ranks", problem({3, 0, 2}, 2, 2, 16, 16, Type::f32, {.causal = true})},
  };
  return rows;
}

struct Way {
  std::string name;
  Sharing sharing;
};

std::vector<Way> ways(const Problem& p, int ranks) {
  const Mask mask{p.options.causal, p.options.window_left, p.options.window_right,
                  p.options.alignment == Alignment::offset ? p.options.diagonal_offset : 0};
  std::vector<Way> out;
  const auto add = [&](const char* name, Partition partition, Scheme scheme, Int64 segment = 0) {
    out.push_back(
        {std::string(name) + " on " + std::to_string(ranks),
         {.partition = std::move(partition), .scheme = scheme, .segment = segment, .timeout = 60, .threads = 1}});
  };
  const Int64 align = p.type == Type::f32 ? 16 : 192;  // see docs/scale_out.md, "Accuracy"
  add("ring, zigzag", zigzag(p.lengths, ranks, align), Scheme::ring);
  add("gather, balanced", balanced(p.lengths, mask, ranks, 32), Scheme::gather);
  add("gather in segments", zigzag(p.lengths, ranks, 64), Scheme::gather, 64);
  for (const int slices : {2, 3, 4, 8}) {
    if (slices > p.Hk || ranks % slices != 0) continue;
    add("two levels, ring", two_level(contiguous(p.lengths, ranks / slices, align), slices, 1), Scheme::ring);
    add("two levels, gather", two_level(zigzag(p.lengths, ranks / slices, 16), slices, 4), Scheme::gather);
  }
  return out;
}

// Each row's float64 answer and that of one device, computed once.
struct Judged {
  World world;
  Answer truth, one;
};

const Judged& judged(const Row& row) {
  static std::map<const Row*, Judged> known;
  const auto found = known.find(&row);
  if (found != known.end()) return found->second;
  World world(row.problem, row.features, 7);
  Answer truth = world.whole(true), one = world.whole(false);
  return known.emplace(&row, Judged{std::move(world), std::move(truth), std::move(one)}).first->second;
}

class Ranks : public testing::TestWithParam<int> {};

// The error of a scheme over all cases and outputs is at most 1.02 times that of one device. Single outputs of one
// problem scatter around 1, as the order of sums differs.
TEST_P(Ranks, ErrorIsThatOfOneDevice) {
  struct Sum {
    double squares = 0, worst = 0;
    int outputs = 0, cases = 0;
  };
  std::map<std::string, Sum> schemes;
  int cases = 0;
  for (const Row& row : table()) {
    const Judged& j = judged(row);
    for (const Way& way : ways(row.problem, GetParam())) {
      const Answer many = j.world.ranks(way.sharing);
      ASSERT_EQ(many.fault, "") << row.name << ", " << way.name;
      Sum& sum = schemes[way.name];
      ++sum.cases, ++cases;
      for (const auto& [name, exact] : j.truth.of) {
        const double error = World::error(many.of.at(name), exact), usual = World::error(j.one.of.at(name), exact);
        const bool few = exact.count() < 512;  // one rounding more or less shows
        EXPECT_LE(error, 1.04 * usual + (few ? 0x1p-21 : 0)) << row.name << ", " << way.name << ": " << name;
        if (few) continue;
        const double ratio = error / usual;
        sum.squares += ratio * ratio, ++sum.outputs, sum.worst = std::max(sum.worst, ratio);
      }
    }
  }
  for (const auto& [name, sum] : schemes) {
    const double ratio = std::sqrt(sum.squares / sum.outputs);
    EXPECT_LE(ratio, 1.02) << name;
    std::printf("dist: %s, %d cases, error / one device's error %.3f (largest %.3f)\n", name.c_str(), sum.cases, ratio,
                sum.worst);
  }
  EXPECT_GT(cases, 30);
}

INSTANTIATE_TEST_SUITE_P(Some, Ranks, testing::Values(1, 2, 3, 4, 8));

// A bias that heads or keys share: sums inside a rank, of calls for some heads and keys each. Slices would share heads.
TEST(BiasGradient, SumsWhatItsBiasShares) {
  const Problem p{{700}, 4, 2, 16, 16, Type::f32, {.causal = true}};
  const auto run = [&](Int64 heads, Int64 keys, int ranks, int slices, Numbers& all) {
    Sharing sharing{.partition = zigzag(p.lengths, ranks / slices, 64), .scheme = Scheme::gather, .threads = 1};
    sharing.partition = two_level(sharing.partition, slices, 1);
    std::string fault;
    run_ranks(ranks, [&](int r, std::shared_ptr<Communicator> c) {
      try {
        const Int64 n = sharing.partition.rows(r);
        Numbers q(p.type, n, 4, 16), k(p.type, n, 2, 16), b(p.type, n, heads, keys), o(p.type, n, 4, 16),
            l(p.type, n, 4, 1), dq(p.type, n, 4, 16), dk(p.type, n, 2, 16), dv(p.type, n, 2, 16),
            db(p.type, n, heads, keys);
        Int64 row = 0;
        for (const Span& span : sharing.partition.of[static_cast<std::size_t>(r)])  // numbers of the whole problem
          for (Int64 i = span.begin; i < span.end; ++i, ++row)
            for (Numbers* x : {&q, &k, &b}) {
              const Int64 each = x->rows.view.row_stride;
              for (Int64 e = 0; e < each; ++e) x->set(row * each + e, std::sin(double(i * each + e) * 1.7));
            }
        Inputs in;
        in.q = q.tokens(), in.k = in.v = k.tokens(), in.bias = World::pair_tensor(b);
        Outputs out;
        out.o = o.tokens(), out.lse = l.numbers();
        Plan plan(c, p, sharing);
        plan.forward(in, out);
        plan.backward(in, {out.o, out.lse, in.q, {}},
                      {dq.tokens(), dk.tokens(), dv.tokens(), World::pair_tensor(db), {}});
        row = 0;
        for (const Span& span : sharing.partition.of[static_cast<std::size_t>(r)])
          for (Int64 i = span.begin; i < span.end; ++i, ++row)
            for (Int64 e = 0; e < heads * keys; ++e) all.set(i * heads * keys + e, db.get(row * heads * keys + e));
      } catch (const Error& error) {
        if (r == 0) fault = error.what();
      }
    });
    return fault;
  };
  Numbers one(p.type, 700, 1, 700), few(p.type, 700, 1, 700);
  EXPECT_EQ(run(1, 700, 1, 1, one), "");
  EXPECT_EQ(run(1, 700, 3, 1, few), "");
  EXPECT_LE(World::error(few, one), 1e-6);
  Numbers one_key(p.type, 700, 4, 1), few_keys(p.type, 700, 4, 1);
  EXPECT_EQ(run(4, 1, 1, 1, one_key), "");
  EXPECT_EQ(run(4, 1, 2, 2, few_keys), "");
  EXPECT_LE(World::error(few_keys, one_key), 1e-5);
  const std::string refused = run(1, 700, 2, 2, few);
  EXPECT_NE(refused.find("dbias: is given, and bias is the same for all heads; where 2 slices share the heads it must "
                         "have each of the 4"),
            std::string::npos)
      << refused;
}

// Every output by itself, over so many problems that the ratio is known to half a percent.
TEST(Accuracy, NoOutputOfAnySchemeIsWorse) {
  const std::vector<Row> rows = {
      {"f32", problem({420}, 2, 1, 16, 16, Type::f32, {.causal = true})},
      {"bf16", problem({1152}, 2, 1, 16, 16, Type::bf16, {.causal = true})},
      {"bf16 in a window", problem({960}, 2, 1, 16, 16, Type::bf16, {.window_left = 300, .window_right = 100})},
      {"f16", problem({600}, 2, 1, 16, 16, Type::f16, {})},
  };
  constexpr unsigned problems = 4;
  double worst = 0;
  for (const Row& row : rows) {
    std::map<std::string, std::map<std::string, std::pair<double, double>>> sums;  // squares: of ranks, of one device
    for (unsigned seed = 1; seed <= problems; ++seed) {
      const World world(row.problem, {}, seed);
      const Answer truth = world.whole(true), one = world.whole(false);
      std::vector<Way> all = ways(row.problem, 3);
      for (Way& way : ways(row.problem, 8)) all.push_back(std::move(way));
      for (const Way& way : all) {
        const Answer many = world.ranks(way.sharing);
        ASSERT_EQ(many.fault, "");
        for (const auto& [name, exact] : truth.of) {
          const double error = World::error(many.of.at(name), exact), usual = World::error(one.of.at(name), exact);
          auto& [ranks_sum, one_sum] = sums[way.name][name];
          ranks_sum += error * error, one_sum += usual * usual;
        }
      }
    }
    for (const auto& [way, outputs] : sums)
      for (const auto& [name, squares] : outputs) {
        const double ratio = std::sqrt(squares.first / squares.second);
        EXPECT_LE(ratio, 1.02) << row.name << ", " << way << ": " << name;
        worst = std::max(worst, ratio);
      }
  }
  std::printf("dist: single outputs, largest error / one device's error %.3f\n", worst);
}

// The same segments are worked on by the same calls, whoever makes them, and sums are trees over segments.
TEST(Bits, SegmentsGiveTheSameOnAnyNumberOfRanks) {
  const std::vector<Row> rows = {
      {"causal bf16", problem({768, 0, 333}, 8, 8, 32, 32, Type::bf16, {.causal = true}), {.sinks = true}},
      {"window f32, dropout",
       problem({700, 200}, 8, 4, 32, 16, Type::f32, {.window_left = 200, .window_right = 60, .dropout = 0.2})},
      {"full f16", problem({385}, 4, 2, 24, 32, Type::f16, {}), {.bias = true, .d_lse = true}},
      {"segments in parts, f32", problem({1500, 300}, 2, 2, 16, 16, Type::f32, {.causal = true})},
  };
  int compared = 0;
  for (const Row& row : rows) {
    const World world(row.problem, row.features, 11);
    const std::vector<Int64>& lengths = row.problem.lengths;
    const Int64 segment = lengths[0] > 1000 ? 144 : 48;  // those of 144 rows are passed on in parts
    const auto run = [&](int nodes, int slices) {
      Answer answer = world.ranks({.partition = two_level(zigzag(lengths, nodes, segment), slices, 16),
                                   .segment = segment,
                                   .timeout = 60,
                                   .threads = 1});
      EXPECT_EQ(answer.fault, "");
      return answer;
    };
    const Answer one = run(1, 1);
    for (const auto& [nodes, slices] :
         std::vector<std::pair<int, int>>{{2, 1}, {3, 1}, {4, 1}, {8, 1}, {1, 2}, {1, 4}, {1, 8}, {2, 2}, {4, 2}}) {
      if (slices > row.problem.Hk) continue;
      const Answer many = run(nodes, slices);
      for (const auto& [name, numbers] : one.of) {
        EXPECT_TRUE(World::same_bits(numbers, many.of.at(name)))
            << row.name << ", " << nodes << " x " << slices << ": " << name;
        ++compared;
      }
    }
  }
  EXPECT_GT(compared, 100);
}

// Heads alone split over ranks: the calls of one device, so its bits, segments or not. The gradients are those of one
// rank, which rounds the sums of several calls.
TEST(Bits, UlyssesGivesThoseOfOneCall) {
  const World world(problem({300, 77}, 8, 8, 32, 32, Type::bf16, {.causal = true}), {.sinks = true}, 5);
  const auto run = [&](int ranks) {
    return world.ranks(
        {.partition = two_level(contiguous(world.problem.lengths, 1, 1), ranks, 1), .timeout = 60, .threads = 1});
  };
  const Answer call = world.whole(false), one = run(1);
  for (const int ranks : {1, 2, 4, 8}) {
    const Answer many = run(ranks);
    ASSERT_EQ(many.fault, "");
    for (const char* name : {"O", "LSE"})
      EXPECT_TRUE(World::same_bits(call.of.at(name), many.of.at(name))) << ranks << ": " << name;
    for (const auto& [name, numbers] : one.of)
      EXPECT_TRUE(World::same_bits(numbers, many.of.at(name))) << ranks << ": " << name;
  }
}

// In a run with the same ranks every scheme repeats its bits.
TEST(Bits, RepeatInEveryRun) {
  const World world(problem({400, 90}, 4, 2, 32, 32, Type::bf16, {.causal = true}), {}, 5);
  for (const Way& way : ways(world.problem, 4)) {
    const Answer first = world.ranks(way.sharing), second = world.ranks(way.sharing);
    for (const auto& [name, numbers] : first.of)
      EXPECT_TRUE(World::same_bits(numbers, second.of.at(name))) << way.name << ": " << name;
  }
}

}  // namespace
}  // namespace tessera::dist
