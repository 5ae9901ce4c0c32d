// SPDX-License-Identifier: Apache-2.0
// The rounds of `tessera bench --suite ladder`: who comes when, warm-ups, what is kept (cli/turns.hpp). A fake timer
// stands for the GPU.
#include "cli/turns.hpp"

#include <gtest/gtest.h>

#include <utility>

namespace tessera::cli {
namespace {

using Order = std::vector<std::size_t>;

TEST(Turns, OrderIsReversedAndRotated) {
  EXPECT_EQ(turns(3, 0), (Order{0, 1, 2}));
  EXPECT_EQ(turns(3, 1), (Order{2, 1, 0}));
  EXPECT_EQ(turns(3, 2), (Order{1, 2, 0}));
  EXPECT_EQ(turns(3, 3), (Order{0, 2, 1}));
  EXPECT_EQ(turns(3, 6), turns(3, 0));
  EXPECT_EQ(turns(2, 1), (Order{1, 0}));
  EXPECT_EQ(turns(0, 5), Order{});
}

TEST(Turns, EachTurnIsWarmedUpAndTimed) {
  std::vector<std::pair<std::size_t, double>> asked;
  const auto times = take_turns(2, {.rounds = 2, .warm = 0.5, .timed = 0.25}, [&](std::size_t n, double budget) {
    asked.emplace_back(n, budget);
    return static_cast<double>(asked.size());
  });
  const std::vector<std::pair<std::size_t, double>> wanted{{0, 0.5}, {0, 0.25}, {1, 0.5}, {1, 0.25},
                                                           {1, 0.5}, {1, 0.25}, {0, 0.5}, {0, 0.25}};
  EXPECT_EQ(asked, wanted);
  EXPECT_EQ(times, (std::vector<std::vector<double>>{{2, 8}, {4, 6}}));  // warm-ups are not kept
}

TEST(Turns, OnGpusAreLongEnough) {
  EXPECT_GE(gpu_pace.warm, 80e-3);
  EXPECT_GE(gpu_pace.timed, 80e-3);
  EXPECT_GE(gpu_pace.rounds, 2);
}

}  // namespace
}  // namespace tessera::cli
