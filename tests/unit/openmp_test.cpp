// SPDX-License-Identifier: Apache-2.0
// parallel_for in a process that has an OpenMP runtime: tests/unit/parallel_test.cpp once more, and whose threads do
// the work. Loads gcc's runtime before the first test; skipped where there is none.
// Uses src/core/parallel.hpp and openmp.hpp; see docs/cpu_kernels.md, "Threads".
#include "core/openmp.hpp"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/parallel.hpp"
#include "tests/support/faults.hpp"

namespace tessera {
namespace {

constexpr int openmp_threads = 4;

struct OpenMp {
  void* library = dlopen("libgomp.so.1", RTLD_LAZY | RTLD_LOCAL);
  template <class Function>
  Function get(const char* name) const {
    return reinterpret_cast<Function>(dlsym(library, name));
  }
  OpenMp() {
    if (library) set_threads(openmp_threads);
  }
  // Of regions that the calling thread begins. Those of others have as many as there are processors.
  void set_threads(int count) const { get<void (*)(int)>("omp_set_num_threads")(count); }
  // ThreadSanitizer does not see that the runtime hands memory over; it sees the atomics.
  void parallel(std::function<void()> body) const {
    struct Region {
      std::atomic<std::function<void()>*> body{nullptr};
      std::atomic<int> ended{0};
    } region;
    region.body = &body;
    get<void (*)(void (*)(void*), void*, unsigned, unsigned)>("GOMP_parallel")(
        [](void* context) {
          auto& [body, ended] = *static_cast<Region*>(context);
          (*body.load())();
          ++ended;
        },
        &region, 0, 0);
    EXPECT_GT(region.ended, 0);
  }
};
const OpenMp openmp;  // made before the tests of both files run

class Threads {
 public:
  void add() {
    const std::lock_guard lock(mutex);
    ids.insert(gettid());  // the system's numbers, which a new thread does not inherit
  }
  std::set<pid_t> ids;

 private:
  std::mutex mutex;
};

// Every worker waits for the others, though not for ever, so that each takes one index.
std::set<pid_t> threads_of_call(int threads) {
  Threads seen;
  std::atomic<int> there{0};
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  parallel_for(threads, threads, [&](std::int64_t, int) {
    seen.add();
    ++there;
    while (there < threads && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  });
  return seen.ids;
}

std::set<pid_t> threads_of_region() {
  Threads seen;
  openmp.parallel([&] { seen.add(); });
  return seen.ids;
}

// The threads of a call that the runtime's threads serve. On a busy machine Patience may have ended by what other tests
// waited; it begins again.
std::set<pid_t> threads_of_served_call(int threads, const std::set<pid_t>& theirs) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(100);
  for (;;) {
    const std::set<pid_t> seen = threads_of_call(threads);
    if (std::includes(theirs.begin(), theirs.end(), seen.begin(), seen.end())) return seen;
    if (std::chrono::steady_clock::now() > end) return seen;
    std::this_thread::sleep_for(Patience::rest);
  }
}

class OpenMpTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!openmp.library) GTEST_SKIP() << "no libgomp.so.1 on this machine";
  }
};

TEST_F(OpenMpTest, ItsThreadsDoTheWork) {
  const auto theirs = threads_of_region();
  ASSERT_EQ(theirs.size(), openmp_threads);
  EXPECT_EQ(threads_of_served_call(openmp_threads, theirs), theirs);
  const auto fewer = threads_of_served_call(2, theirs);
  EXPECT_EQ(fewer.size(), 2);
  for (const pid_t id : fewer) EXPECT_TRUE(theirs.count(id));
  EXPECT_EQ(threads_of_region(), theirs) << "a call that needs fewer must not end the others";
}

// Runs one test of this program once more, with a variable set.
void run_again(const char* test, const char* variable, const char* value) {
  setenv(variable, value, 1);
  const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
  EXPECT_EQ(std::system((self + " --gtest_filter=" + test).c_str()), 0);
  unsetenv(variable);
}

// The variable is looked at once.
TEST_F(OpenMpTest, MayBeSwitchedOff) {
  constexpr const char* variable = "TESSERA_OPENMP";
  if (!std::getenv(variable)) return run_again("OpenMpTest.MayBeSwitchedOff", variable, "0");
  const auto theirs = threads_of_region(), ours = threads_of_call(openmp_threads);
  ASSERT_EQ(ours.size(), openmp_threads);
  for (const pid_t id : ours) EXPECT_EQ(theirs.count(id), id == gettid());
}

TEST(Patience, EndsWhenWaitingCostsMoreThanTheWork) {
  using std::chrono::microseconds, std::chrono::milliseconds;
  Patience patience;
  Time now = std::chrono::hours(1);
  const auto region = [&](microseconds work, microseconds waited) {
    patience.add(now += work + waited, work + waited, openmp_threads * work, openmp_threads);
  };
  for (int n = 0; n < 100000; ++n) {  // as usual: tasks that cannot be shared out evenly, a long wait now and then
    region(microseconds(200), n % 200 == 0 ? milliseconds(16) : microseconds(400));
    ASSERT_FALSE(patience.ended(now)) << n;
  }
  int regions = 0;
  for (; !patience.ended(now) && regions < 1000; ++regions)
    region(microseconds(200), regions % 4 == 0 ? milliseconds(8) : microseconds(5));
  EXPECT_GT(regions, 2);
  EXPECT_LT(regions, 20);
  EXPECT_TRUE(patience.ended(now + Patience::rest - microseconds(1)));
  now += Patience::rest;
  EXPECT_FALSE(patience.ended(now)) << "tries again";
  region(microseconds(200), milliseconds(16));
  EXPECT_TRUE(patience.ended(now)) << "and sees at once that nothing has changed";
  now += Patience::rest;
  for (int n = 0; n < 100; ++n) region(microseconds(200), microseconds(5));
  region(microseconds(200), milliseconds(16));
  EXPECT_FALSE(patience.ended(now)) << "all is well again, but for one wait";
}

// One of its threads hardly ever gets a processor: calls stop waiting for it. In a process of its own, whose threads
// may be spoilt.
TEST_F(OpenMpTest, NobodyWaitsLongForAThreadWithoutAProcessor) {
  constexpr const char* variable = "TESSERA_TEST_SPOILS_THREADS";
  if (!std::getenv(variable)) return run_again("OpenMpTest.NobodyWaitsLongForAThreadWithoutAProcessor", variable, "1");
  const auto theirs = threads_of_region();
  cpu_set_t allowed, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
  CPU_ZERO(&one);
  for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++cpu)
    if (CPU_ISSET(cpu, &allowed)) CPU_SET(cpu, &one);
  pid_t late = 0;
  for (const pid_t id : theirs) late = id == gettid() ? late : id;
  const sched_param none{};
  if (sched_setaffinity(late, sizeof(one), &one) != 0 || sched_setscheduler(late, SCHED_IDLE, &none) != 0)
    GTEST_SKIP() << "threads cannot be slowed down here";
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    sched_setaffinity(0, sizeof(one), &one);
    while (!stop) {
    }
  });
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  bool ours = false;  // some thread is not theirs
  while (!ours && std::chrono::steady_clock::now() < end) {
    Threads seen;
    parallel_for(1000, openmp_threads, [&](std::int64_t, int) { seen.add(); });
    for (const pid_t id : seen.ids) ours |= !theirs.count(id);
  }
  stop = true;
  busy.join();
  EXPECT_TRUE(ours);
}

std::size_t threads_alive() {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& task : std::filesystem::directory_iterator("/proc/self/task")) ++count;
  return count;
}

// A runtime keeps threads for every thread that begins a region, so few callers may. In a process of its own.
TEST_F(OpenMpTest, ManyCallersKeepFewThreads) {
  constexpr const char* variable = "TESSERA_TEST_COUNTS_THREADS";
  if (!std::getenv(variable)) return run_again("OpenMpTest.ManyCallersKeepFewThreads", variable, "1");
  constexpr std::size_t callers = 20;
  const std::size_t before = threads_alive();
  std::atomic<bool> stop{false};
  std::vector<std::thread> list;
  for (std::size_t n = 0; n < callers; ++n) {  // one after the other, and all stay
    std::atomic<bool> called{false};
    list.emplace_back([&] {
      openmp.set_threads(openmp_threads);
      EXPECT_EQ(threads_of_call(openmp_threads).size(), openmp_threads);
      called = true;
      while (!stop) std::this_thread::yield();
    });
    while (!called) std::this_thread::yield();
  }
  EXPECT_LE(threads_alive() - before, callers + 3 * (openmp_threads - 1)) << "two teams and the pool";
  stop = true;
  for (std::thread& caller : list) caller.join();
  const auto theirs = threads_of_region();
  EXPECT_EQ(threads_of_served_call(openmp_threads, theirs), theirs)
      << "the places of callers that have ended are free again";
}

#if !TESSERA_TEST_SANITIZED
// gcc's runtime ends the process when it cannot make a thread. In a process of its own, whose threads are missing.
TEST_F(OpenMpTest, ThreadsThatCannotBeMade) {
  constexpr const char* variable = "TESSERA_TEST_REFUSES_THREADS";
  if (!std::getenv(variable)) return run_again("OpenMpTest.ThreadsThatCannotBeMade", variable, "1");
  ASSERT_EQ(dlsym(RTLD_DEFAULT, "pthread_create"), reinterpret_cast<void*>(&pthread_create))
      << "the runtime's threads would not be refused";
  const auto computes = [] {
    std::atomic<int> sum{0};
    parallel_for(100, openmp_threads, [&](std::int64_t, int) { ++sum; });
    EXPECT_EQ(sum, 100);
  };
  test::allow_threads(0);
  computes();  // the first region would make all of them
  test::allow_threads(openmp_threads - 2);
  computes();  // one of them
  test::allow_threads(-1);
  const auto theirs = threads_of_region();
  EXPECT_EQ(threads_of_served_call(openmp_threads, theirs), theirs);
  test::allow_threads(0);
  EXPECT_EQ(threads_of_served_call(openmp_threads, theirs), theirs) << "none has to be made";
  test::allow_threads(-1);
  const std::size_t before = threads_alive();
  openmp.set_threads(2);
  threads_of_region();  // ends the others
  while (threads_alive() > before - (openmp_threads - 2)) std::this_thread::yield();
  openmp.set_threads(openmp_threads);
  test::allow_threads(0);
  computes();
  test::allow_threads(-1);
}
#endif

TEST_F(OpenMpTest, MoreThreadsThanItHas) { EXPECT_EQ(threads_of_call(openmp_threads + 3).size(), openmp_threads + 3); }

TEST_F(OpenMpTest, CallsFromARegion) {
  std::atomic<int> sum{0};
  openmp.parallel([&] { parallel_for(100, openmp_threads, [&](std::int64_t, int) { ++sum; }); });
  EXPECT_EQ(sum, 100 * openmp_threads);
}

TEST_F(OpenMpTest, ForkedChild) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer does not follow threads that start after a fork";
#endif
  threads_of_region();  // the child inherits a runtime that believes in threads which are not there
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(200);  // ends a child that hangs
    std::atomic<int> sum{0};
    parallel_for(100, openmp_threads, [&](std::int64_t, int) { ++sum; });
    _exit(sum == 100 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
}

}  // namespace
}  // namespace tessera
