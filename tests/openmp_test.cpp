// parallel_for in a process that has an OpenMP runtime: tests/parallel_test.cpp once more, and whose threads do the
// work. Loads gcc's runtime before the first test; skipped where there is none.
// Uses src/core/parallel.hpp and openmp.hpp; see docs/architecture.md, "Threads".
#include "core/openmp.hpp"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "core/parallel.hpp"

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
    if (library) get<void (*)(int)>("omp_set_num_threads")(openmp_threads);
  }
  void parallel(std::function<void()> body) const {
    get<void (*)(void (*)(void*), void*, unsigned, unsigned)>("GOMP_parallel")(
        [](void* context) { (*static_cast<std::function<void()>*>(context))(); }, &body, 0, 0);
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

class OpenMpTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!openmp.library) GTEST_SKIP() << "no libgomp.so.1 on this machine";
  }
};

TEST_F(OpenMpTest, ItsThreadsDoTheWork) {
  const auto theirs = threads_of_region();
  ASSERT_EQ(theirs.size(), openmp_threads);
  EXPECT_EQ(threads_of_call(openmp_threads), theirs);
  const auto fewer = threads_of_call(2);
  EXPECT_EQ(fewer.size(), 2);
  for (const pid_t id : fewer) EXPECT_TRUE(theirs.count(id));
  EXPECT_EQ(threads_of_region(), theirs) << "a call that needs fewer must not end the others";
}

// Runs itself once more with the variable set, which is looked at once.
TEST_F(OpenMpTest, MayBeSwitchedOff) {
  constexpr const char* variable = "TESSERA_OPENMP";
  if (!std::getenv(variable)) {
    setenv(variable, "0", 1);
    const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
    EXPECT_EQ(std::system((self + " --gtest_filter=OpenMpTest.MayBeSwitchedOff").c_str()), 0);
    unsetenv(variable);
    return;
  }
  const auto theirs = threads_of_region(), ours = threads_of_call(openmp_threads);
  ASSERT_EQ(ours.size(), openmp_threads);
  for (const pid_t id : ours) EXPECT_EQ(theirs.count(id), id == gettid());
}

TEST_F(OpenMpTest, MoreThreadsThanItHas) { EXPECT_EQ(threads_of_call(openmp_threads + 3).size(), openmp_threads + 3); }

TEST_F(OpenMpTest, CallsFromARegion) {
  std::atomic<int> sum{0};
  openmp.parallel([&] { parallel_for(100, openmp_threads, [&](std::int64_t, int) { ++sum; }); });
  EXPECT_EQ(sum, 100 * openmp_threads);
}

TEST_F(OpenMpTest, ForkedChild) {
  threads_of_region();  // the child inherits a runtime that believes in threads which are not there
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);  // ends a child that hangs
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
