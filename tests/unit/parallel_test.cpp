// SPDX-License-Identifier: Apache-2.0
// The pool behind parallel_for: every index once, errors come back, calls inside calls and beside each other.
// Run under ThreadSanitizer by `make tsan` (label threads).
// Uses src/core/parallel.hpp alone; see docs/cpu_kernels.md, "Threads".
#include "core/parallel.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

namespace tessera {
namespace {

void expect_each_index_once(std::int64_t count, int threads) {
  std::vector<std::atomic<int>> seen(static_cast<std::size_t>(count));
  std::atomic<int> strangers{0};
  parallel_for(count, threads, [&](std::int64_t i, int worker) {
    ++seen[static_cast<std::size_t>(i)];
    if (worker < 0 || worker >= std::max(threads, 1)) ++strangers;
  });
  for (std::int64_t i = 0; i < count; ++i) ASSERT_EQ(seen[static_cast<std::size_t>(i)], 1) << i << " of " << count;
  EXPECT_EQ(strangers, 0);
}

TEST(Parallel, EachIndexExactlyOnce) {
  for (std::int64_t count : {0, 1, 2, 3, 7, 64, 1000})
    for (int threads : {0, 1, 2, 3, 8, 33}) expect_each_index_once(count, threads);
}

// A worker's number chooses its scratch memory: two threads of one call never share it.
TEST(Parallel, WorkersDoNotShareANumber) {
  constexpr int threads = 6;
  std::vector<std::atomic<bool>> busy(threads);
  std::atomic<int> clashes{0};
  parallel_for(2000, threads, [&](std::int64_t, int worker) {
    auto& mine = busy[static_cast<std::size_t>(worker)];
    if (mine.exchange(true)) ++clashes;
    std::this_thread::yield();
    mine = false;
  });
  EXPECT_EQ(clashes, 0);
}

TEST(Parallel, FirstErrorComesBack) {
  constexpr std::int64_t many = 50'000'000;  // more than others get done while the thread with the error is preempted
  for (int threads : {1, 2, 5}) {
    std::atomic<std::int64_t> started{0};
    const auto body = [&](std::int64_t i, int) {
      ++started;
      if (i == 10) throw std::runtime_error("ten");
    };
    try {
      parallel_for(many, threads, body);
      FAIL() << "no error";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "ten");
    }
    EXPECT_LT(started, many) << "the rest is not worth computing";
    expect_each_index_once(100, threads);  // the pool has survived
  }
}

TEST(Parallel, EveryTaskMayFail) {
  EXPECT_THROW(parallel_for(1000, 4, [](std::int64_t, int) { throw std::logic_error("all"); }), std::logic_error);
}

TEST(Parallel, CallsInsideCalls) {
  std::atomic<int> sum{0};
  parallel_for(8, 3, [&](std::int64_t, int) {
    parallel_for(16, 3, [&](std::int64_t, int) { parallel_for(4, 2, [&](std::int64_t, int) { ++sum; }); });
  });
  EXPECT_EQ(sum, 8 * 16 * 4);
}

TEST(Parallel, CallsBesideEachOther) {
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 6; ++caller)
    callers.emplace_back([caller] {
      for (int round = 0; round < 50; ++round) expect_each_index_once(37 + caller, 1 + round % 5);
    });
  for (std::thread& caller : callers) caller.join();
}

TEST(Parallel, ManySmallJobs) {
  std::int64_t total = 0;
  for (int job = 0; job < 4000; ++job) {
    std::atomic<std::int64_t> sum{0};
    parallel_for(3, 2, [&](std::int64_t i, int) { sum += i; });
    total += sum;
  }
  EXPECT_EQ(total, 3 * 4000);
}

// What a task wrote is there when the call returns, without atomics: ThreadSanitizer watches.
TEST(Parallel, ResultsAreVisibleAfterwards) {
  std::vector<std::int64_t> squares(5000);
  parallel_for(5000, 4, [&](std::int64_t i, int) { squares[static_cast<std::size_t>(i)] = i * i; });
  for (std::int64_t i = 0; i < 5000; ++i) ASSERT_EQ(squares[static_cast<std::size_t>(i)], i * i);
}

// Every task of a step sees what all the tasks of the steps before have written, without atomics.
TEST(Parallel, StepsFollowEachOther) {
  const std::vector<std::int64_t> counts{40, 1, 0, 300, 7};
  for (int threads : {1, 2, 3, 8})
    for (int repeat = 0; repeat < 50; ++repeat) {
      std::vector<std::vector<std::int64_t>> written;
      for (const std::int64_t count : counts) written.emplace_back(static_cast<std::size_t>(count));
      std::vector<Step> steps;
      for (std::size_t n = 0; n < counts.size(); ++n)
        steps.push_back({counts[n], [&, n](std::int64_t i, int) {
                           std::int64_t before = 0;
                           for (std::size_t m = 0; m < n; ++m)
                             for (const std::int64_t x : written[m]) before += x != 0;
                           if (i % 5 == 0) std::this_thread::yield();
                           written[n][static_cast<std::size_t>(i)] += 1 + before;
                         }});
      parallel_steps(steps, threads);
      std::int64_t before = 0;
      for (std::size_t n = 0; n < counts.size(); before += counts[n++])
        for (const std::int64_t x : written[n])
          ASSERT_EQ(x, 1 + before) << "step " << n << ", " << threads << " threads";
    }
}

TEST(Parallel, NoStepAfterAnError) {
  for (int threads : {1, 2, 5}) {
    std::atomic<int> later{0};
    const std::vector<Step> steps{{100,
                                   [](std::int64_t i, int) {
                                     if (i == 99) throw std::runtime_error("last");
                                   }},
                                  {100, [&](std::int64_t, int) { ++later; }}};
    EXPECT_THROW(parallel_steps(steps, threads), std::runtime_error);
    EXPECT_EQ(later, 0);
  }
  parallel_steps({}, 4);
}

TEST(Parallel, ThreadsAreResolved) {
  EXPECT_EQ(resolve_threads(5), 5);
  EXPECT_GE(resolve_threads(0), 1);
}

}  // namespace
}  // namespace tessera
