// SPDX-License-Identifier: Apache-2.0
// Forks while another thread is in its first call: the child must neither wait for that thread, which it does not have,
// nor compute other bits. The other thread stands still at its n-th allocation, for every n, and the child calls.
// Links tessera_cases and faults.cpp. See docs/cpu_kernels.md, "Memory that runs out, forks".
#include <semaphore.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/faults.hpp"
#include "tests/support/support.hpp"

namespace tessera::test {
namespace {

// The caller stands still here until the fork has happened. In memory that children do not share.
struct Gate {
  sem_t reached, open;
} gate;

void wait_at_gate() {
  sem_post(&gate.reached);
  while (sem_wait(&gate.open) != 0) {
  }
}

// Exit status of a forked child that runs body; 99: it hung or crashed.
int in_child(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(200);  // ends a child that hangs
    _exit(body());
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 99;
}

enum Outcome { fine = 0, wrong = 1, past_the_end = 2 };

// In a process that has not called the library: a thread calls, stops at its n-th allocation, and a child is forked.
// past_the_end: the call has fewer allocations.
Outcome fork_at_allocation(long n, const std::function<void()>& call, const std::function<bool()>& child_is_right) {
  const int status = in_child([&]() -> int {
    sem_init(&gate.reached, 0, 0), sem_init(&gate.open, 0, 0);
    std::atomic<bool> done{false};
    std::thread caller([&] {
      pause_at_allocation(n, wait_at_gate);
      call();
      done = true;
      sem_post(&gate.reached);
    });
    while (sem_wait(&gate.reached) != 0) {
    }
    const bool ended = done;
    int result = past_the_end;
    if (!ended) {
      stop_counting();
      result = in_child([&] { return child_is_right() ? fine : wrong; });
      sem_post(&gate.open);
    }
    caller.join();
    return result;
  });
  return status == fine ? fine : status == past_the_end ? past_the_end : wrong;
}

void expect_children_are_right(const std::string& name, const std::function<void()>& call,
                               const std::function<bool()>& child_is_right) {
  long n = 1;
  for (Outcome outcome = fine; outcome == fine && n < 10000; ++n) {
    outcome = fork_at_allocation(n, call, child_is_right);
    ASSERT_NE(outcome, wrong) << name << ": a child of a process in which a thread stands at allocation " << n;
  }
  EXPECT_GT(n, 3) << name << ": hardly any allocation";
}

Case small(const char* name) {
  return {.name = name, .B = 2, .Nq = 70, .Nk = 200, .Hq = 2, .Hk = 1, .D = 16, .options = {.causal = true}};
}

class Forks : public testing::TestWithParam<const char*> {};

TEST_P(Forks, DuringTheFirstCall) {
  const Execution execution{.threads = 3, .kernel = GetParam()};
  CaseData theirs = build(small("theirs")), child = build(small("child"));
  const auto expected = [&] {  // computed by a process of its own, like everything here
    auto* sums = static_cast<std::uint64_t*>(
        mmap(nullptr, 2 * sizeof(std::uint64_t), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    EXPECT_EQ(in_child([&] {
                run(child, execution);
                sums[0] = child.o.fingerprint(), sums[1] = child.dk.fingerprint();
                return 0;
              }),
              0);
    return std::pair{sums[0], sums[1]};
  }();
  expect_children_are_right(
      execution.kernel ? execution.kernel : "best", [&] { run(theirs, execution); },
      [&] {
        run(child, execution);
        return std::pair{child.o.fingerprint(), child.dk.fingerprint()} == expected;
      });
}

INSTANTIATE_TEST_SUITE_P(Kernels, Forks, testing::Values(nullptr, "reference"),
                         [](const auto& info) { return std::string(info.param ? info.param : "best"); });

TEST(Fork, DuringTheFirstMask) {
  const Buffer theirs(Type::u8, {2, 2, 10, 10}), child(Type::u8, {2, 2, 10, 10});
  const Options options{.dropout = 0.5, .seed = 3};
  expect_children_are_right(
      "dropout mask", [&] { dropout_mask(theirs.tensor(), options, {}, {.threads = 3}); },
      [&] {
        dropout_mask(child.tensor(), options, {}, {.threads = 3});
        return child.get(0) == 0 || child.get(0) == 1;
      });
}

// Not paused anywhere: threads call again and again, with new questions, while children are forked.
TEST(Fork, AnyTime) {
#if defined(__SANITIZE_ADDRESS__)
  // Its locks stay locked in a child that is forked while another thread is in malloc; glibc's allocator lets them go.
  GTEST_SKIP() << "AddressSanitizer's allocator does not survive a fork beside threads that allocate";
#endif
  EXPECT_EQ(in_child([]() -> int {
              std::atomic<bool> stop{false};
              std::vector<std::thread> callers;
              for (int caller = 0; caller < 3; ++caller)
                callers.emplace_back([&stop, caller] {
                  for (std::int64_t n = 1; !stop; ++n) {
                    CaseData data = build({.name = "", .Nq = 64 * (caller + 1), .Nk = 1 + n % 200, .D = 8});
                    run(data, {.threads = 2});
                  }
                });
              int failed = 0;
              for (int child = 0; child < 100; ++child)
                failed += in_child([child] {
                            CaseData data = build({.name = "", .Nq = 200, .Nk = 301 + child, .D = 8});
                            run(data, {.threads = 3});
                            return 0;
                          }) != 0;
              stop = true;
              for (std::thread& caller : callers) caller.join();
              return failed;
            }),
            0);
}

}  // namespace
}  // namespace tessera::test
