// SPDX-License-Identifier: Apache-2.0
// Rounds in which contenders take turns on a GPU. Included by cli/bench_ladder.cpp; the rule is that of
// python/tessera/_rounds.py. Method: docs/benchmarks.md.
//
// A GPU at its power limit passes its temperature and clocks on from one contender to the next. So every turn begins
// with a warm-up that does not count, and the order changes from round to round.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

namespace tessera::cli {

struct Pace {
  int rounds;
  double warm, timed;  // seconds of each contender in each round
};
inline constexpr Pace gpu_pace{.rounds = 4, .warm = 80e-3, .timed = 80e-3};

// The order of one round: every odd round is the one before it reversed, every second round rotates by one.
inline std::vector<std::size_t> turns(std::size_t count, int round) {
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (count) std::rotate(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(round / 2 % count), order.end());
  if (round % 2) std::reverse(order.begin(), order.end());
  return order;
}

// timer(contender, budget): seconds of one call, from as many as take `budget` seconds. Of each contender, one figure
// per round.
template <class Timer>
std::vector<std::vector<double>> take_turns(std::size_t count, const Pace& pace, const Timer& timer) {
  std::vector<std::vector<double>> times(count);
  for (int round = 0; round < pace.rounds; ++round)
    for (const std::size_t one : turns(count, round)) {
      timer(one, pace.warm);
      times[one].push_back(timer(one, pace.timed));
    }
  return times;
}

}  // namespace tessera::cli
