// SPDX-License-Identifier: Apache-2.0
// The simulator against times that can be computed by hand. Implements docs/scale_out.md, "Simulator".
#include "dist/simulate.hpp"

#include <gtest/gtest.h>

#include <algorithm>

namespace tessera::dist {
namespace {

constexpr Shape shape{.Hq = 4, .Hk = 2, .D = 64, .Dv = 64, .bytes = 2};

Schedule schedule(int nodes, int slices, Scheme scheme, Pass pass) {
  const std::vector<Int64> lengths{Int64(2 * nodes) * 128};
  return make_schedule(lengths, {.causal = true}, two_level(zigzag(lengths, nodes, 128), slices, 1), {scheme, pass, 0});
}

TEST(Simulator, OneRankIsItsFlopsAndItsCalls) {
  const Machine machine{.forward_flops = 1e12, .backward_flops = 5e11, .call_seconds = 1e-3};
  const double pairs = 256.0 * 257 / 2, heads = 4;
  const Simulated f = simulate(schedule(1, 1, Scheme::gather, Pass::forward), shape, machine);
  EXPECT_EQ(f.calls, 1);
  EXPECT_DOUBLE_EQ(f.compute, 2 * heads * 128 * pairs / 1e12);
  EXPECT_DOUBLE_EQ(f.seconds, f.compute + 1e-3);
  const Simulated b = simulate(schedule(1, 1, Scheme::gather, Pass::backward), shape, machine);
  EXPECT_DOUBLE_EQ(b.compute, 2 * heads * 320 * pairs / 5e11);
}

// Measured calls of 1, 3 and 30 GFLOP: smaller ones take as long as the first, larger ones have the rate of the last.
TEST(Simulator, CallsMayBeMeasured) {
  const CallTimes times{{{1e9, 10e-6}, {3e9, 14e-6}, {30e9, 60e-6}}};
  EXPECT_DOUBLE_EQ(times.seconds(0.2e9), 10e-6);
  EXPECT_DOUBLE_EQ(times.seconds(2e9), 12e-6);
  EXPECT_DOUBLE_EQ(times.seconds(30e9), 60e-6);
  EXPECT_DOUBLE_EQ(times.seconds(90e9), 180e-6);
  EXPECT_DOUBLE_EQ(times.best_rate(), 500e12);

  const double flops = 2 * 4 * 128 * (256.0 * 257 / 2);
  Machine machine{.forward_flops = 1, .backward_flops = 1, .call_seconds = 1};
  machine.forward_times.points = {{flops / 2, 1}, {2 * flops, 4}};
  const Simulated s = simulate(schedule(1, 1, Scheme::gather, Pass::forward), shape, machine);
  EXPECT_DOUBLE_EQ(s.seconds, 2);
  EXPECT_DOUBLE_EQ(s.compute, 2);  // 0.5 flops a second, which both have
  machine.forward_times.points[0].seconds = 0.5;
  EXPECT_DOUBLE_EQ(simulate(schedule(1, 1, Scheme::gather, Pass::forward), shape, machine).compute, 1);
}

TEST(Simulator, FreeMessagesCostNothingAndSlowOnesRule) {
  const Machine fast{.call_seconds = 0, .link = 1e30, .node_link = 1e30, .latency = 0};
  for (const Scheme scheme : {Scheme::ring, Scheme::gather})
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      const Simulated s = simulate(schedule(1, 2, scheme, pass), shape, fast);
      EXPECT_NEAR(s.efficiency(), 1, 1e-9);
    }
  // A ring of two without any compute: one step of messages, 256 rows of K and V in bf16 at most.
  const Machine slow{.forward_flops = 1e30, .call_seconds = 0, .link = 1e6, .latency = 0.5};
  const Simulated s = simulate(schedule(2, 1, Scheme::ring, Pass::forward), shape, slow);
  EXPECT_DOUBLE_EQ(s.seconds, 0.5 + 256.0 * 2 * 128 * 2 / 1e6);
}

TEST(Simulator, RingsWaitForTheSlowestStep) {
  // Zigzag halves: every step of a ring of P has the same work, so with links that keep up nothing is lost.
  const Machine machine{.forward_flops = 1e9, .call_seconds = 0, .link = 1e15, .latency = 0};
  const Simulated s = simulate(schedule(8, 1, Scheme::ring, Pass::forward), shape, machine);
  EXPECT_GT(s.efficiency(), 0.97);
  EXPECT_EQ(s.key_bytes, 256.0 * 3 * 2 * 128 * 2);  // own, and two sets
}

// Two ranks, 512 rows, no compute to speak of: three groups one after the other, of which the second brings each rank
// what it lacks of the first slots.
TEST(Simulator, GroupsTravelOneAfterTheOther) {
  const std::vector<Int64> lengths{512};
  const Schedule s = make_schedule(lengths, {.causal = true}, zigzag(lengths, 2, 128), {.grain = 128});
  const Machine machine{.forward_flops = 1e30, .call_seconds = 0, .link = 1e6, .latency = 0.5};
  double busy = 0;
  int groups = 0;
  for (std::size_t t = 0; t < s.of[0].steps.size(); ++t) {
    double rows[2][2] = {};
    for (std::size_t r = 0; r < 2; ++r)
      for (const Transfer& x : s.of[r].steps[t].group) rows[r][x.send] += double(x.rows.rows());
    EXPECT_EQ(rows[0][1], rows[1][0]);
    busy += std::max(rows[0][1], rows[1][1]) * 2 * 128 * 2 / 1e6;
    groups += rows[0][0] + rows[0][1] > 0;
  }
  EXPECT_GE(groups, 2);
  EXPECT_NEAR(simulate(s, shape, machine).seconds, busy + 0.5 * groups, 1e-9);
}

// What travels beside work costs nothing: a gather loses its first groups and, backward, its last ones.
TEST(Simulator, ArrivalsAndReturnsTravelBesideTheWork) {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const std::vector<Int64> lengths{1 << 16};
    const Schedule s = make_schedule(lengths, {.causal = true}, zigzag(lengths, 8, 128), {.pass = pass});
    const Machine machine{.forward_flops = 1e12, .backward_flops = 1e12, .call_seconds = 0, .link = 1e9, .latency = 0};
    const Simulated fast = simulate(s, shape, machine);
    double bytes = 0;  // of which messages take three times as long as what is lost
    for (const Step& step : s.of[0].steps)
      for (const Transfer& x : step.group)
        if (!x.send) bytes += double(x.rows.rows()) * 2 * 128 * (x.what == What::keys ? 2 : 4);
    EXPECT_GT(bytes / machine.link, 0.1 * fast.seconds);
    EXPECT_LT(fast.seconds - fast.compute, bytes / machine.link / 3);
  }
}

// Messages that alone take 0.6 times as long as the work alone: a gather of few nodes hides most of them.
TEST(Simulator, AGatherOfFewNodesHidesItsMessages) {
  for (const Pass pass : {Pass::forward, Pass::backward})
    for (const int nodes : {2, 3, 4, 8}) {
      const std::vector<Int64> lengths{1 << 14};
      const Schedule s = make_schedule(lengths, {.causal = true}, zigzag(lengths, nodes, 192), {.pass = pass});
      const auto seconds = [&](double flops, double link) {
        return simulate(s, shape, {flops, flops, 0, link, link, 0}).seconds;
      };
      const double work = seconds(1e9, 1e30), messages = 0.6 * work, link = 1e6 * seconds(1e30, 1e6) / messages;
      EXPECT_GT((work + messages - seconds(1e9, link)) / messages, 0.75) << nodes;
    }
}

// The bar of docs/scale_out.md: 1M tokens on 64 nodes of 8, 32 query and 8 key heads.
TEST(Simulator, AnOrderedGatherKeeps512RanksBusy) {
  const std::vector<Int64> lengths{1 << 20};
  const Partition partition = two_level(zigzag(lengths, 64, 128), 8, 1);
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const Schedule s = make_schedule(lengths, {.causal = true}, partition, {.pass = pass});
    EXPECT_GE(simulate(s, Shape{}, Machine{}).efficiency(), 0.95);
  }
}

}  // namespace
}  // namespace tessera::dist
