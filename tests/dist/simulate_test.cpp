// SPDX-License-Identifier: Apache-2.0
// The simulator against times that can be computed by hand. Implements docs/scale_out.md, "Simulator".
#include "dist/simulate.hpp"

#include <gtest/gtest.h>

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

TEST(Simulator, ABroadcastLeavesOnce) {
  Machine machine{.forward_flops = 1e30, .call_seconds = 0, .link = 1e6, .latency = 0};
  const Schedule s = schedule(4, 1, Scheme::gather, Pass::forward);
  const double shared = simulate(s, shape, machine).seconds;
  machine.shared = false;
  EXPECT_GT(simulate(s, shape, machine).seconds, 1.5 * shared);
}

TEST(Simulator, RingsWaitForTheSlowestStep) {
  // Zigzag halves: every step of a ring of P has the same work, so with links that keep up nothing is lost.
  const Machine machine{.forward_flops = 1e9, .call_seconds = 0, .link = 1e15, .latency = 0};
  const Simulated s = simulate(schedule(8, 1, Scheme::ring, Pass::forward), shape, machine);
  EXPECT_GT(s.efficiency(), 0.97);
  EXPECT_EQ(s.key_bytes, 256.0 * 3 * 2 * 128 * 2);  // own, and two sets
}

}  // namespace
}  // namespace tessera::dist
