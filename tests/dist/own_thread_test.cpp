// SPDX-License-Identifier: Apache-2.0
// Plans that work on a thread of their communicator's own, as over MPI: the same bits and the same sentences, also
// where a call of the transport never returns, and in a forked child. Implements docs/scale_out.md, "Failure".
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "dist/worker.hpp"
#include "tests/dist/fault_run.hpp"

namespace tessera::dist {
namespace {

// Ranks whose plans work on a thread of their communicator's own, as over MPI.
class Aside : public Faulty {
 public:
  using Faulty::Faulty;
  Worker* worker() override { return &thread; }

 private:
  Worker thread;
};

// A call that does not return until it is let go. From then on the communicator counts what it is asked for.
class Hanging : public Aside {
 public:
  enum Where { in_start, in_test, in_notice, in_fail };
  Hanging(std::shared_ptr<Communicator> real, Fault fault, Where where) : Aside(std::move(real), fault), where(where) {}

  void start(std::span<const Message> group) override {
    if (groups++ == 2 && where != in_fail) hang_from_now = true;
    Aside::start(group);  // which has taken the messages over then, as a transport of callbacks has
    hang(in_start);
  }
  std::vector<bool> test() override {
    hang(in_test);
    return Aside::test();
  }
  std::optional<std::string> notice() override {
    hang(in_notice);
    return Aside::notice();
  }
  void fail(const std::string&) noexcept override {
    if (where == in_fail) hang_from_now = true;
    hang(in_fail);
  }
  void let_go() { is_free = true; }
  std::atomic<int> asked_since{0};

 private:
  void hang(Where here) {
    if (is_free) ++asked_since;
    while (hang_from_now && here == where && !is_free) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const Where where;
  int groups = 0;
  bool hang_from_now = false;
  std::atomic<bool> is_free{false};
};

TEST(OwnThreads, GiveTheSameBits) {
  const Outcome here = run({}), aside = run({}, [](int, std::shared_ptr<Communicator> c) {
                                  return std::make_shared<Aside>(std::move(c), Fault{});
                                });
  expect_all(aside, "");
  for (const auto& [name, numbers] : here.all.of)
    for (Int64 i = 0; i < numbers.count(); ++i) ASSERT_EQ(numbers.get(i), aside.all.of.at(name).get(i)) << name;
}

TEST(OwnThreads, PassOnWhatIsThrown) {
  const Outcome out = run({}, [](int r, std::shared_ptr<Communicator> c) {
    return std::make_shared<Aside>(std::move(c), Fault{r == 3 ? Fault::fail : Fault::none, 2});
  });
  expect_heard(out, "the network is down");
  const Outcome wrong =
      run([](int, Problem& p, Sharing&) { p.options.softcap = -1; },
          [](int, std::shared_ptr<Communicator> c) { return std::make_shared<Aside>(std::move(c), Fault{}); });
  expect_all(wrong, "softcap: is -1; must be 0 (none) or a positive number from 1e-18 to 1e18");
  EXPECT_EQ(wrong.status[0], TESSERA_INVALID_ARGUMENT);
}

// Threads are not forked: a child that waited for one would wait for ever.
TEST(OwnThreads, AreRefusedInAForkedChild) {
  Worker worker;
  int runs = 0;
  worker.run([&] { ++runs; });
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // a child that hangs ends
    try {
      worker.run([&] { ++runs; });
    } catch (const Error& e) {
      _exit(e.status() == TESSERA_INVALID_ARGUMENT && std::string(e.what()).starts_with("communicator: ") ? 0 : 1);
    }
    _exit(2);
  }
  ASSERT_GT(child, 0);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << status;
  EXPECT_EQ(WEXITSTATUS(status), 0);
  worker.run([&] { ++runs; });
  EXPECT_EQ(runs, 2);
}

// The rank whose transport hangs answers like all others, and when the call returns after all, nothing follows: the
// plan, the tensors and the caller's stack are gone by then.
TEST(OwnThreads, ACallThatNeverReturnsIsLeftBehind) {
  const auto expect_left_behind = [](Hanging::Where where) {
    Hanging* hanging = nullptr;
    const Outcome out = run({}, [&](int r, std::shared_ptr<Communicator> c) -> std::shared_ptr<Communicator> {
      if (r != 1) return std::make_shared<Aside>(std::move(c), Fault{});
      const Fault fault{where == Hanging::in_fail ? Fault::fail : Fault::none, 2};
      const auto made = std::make_shared<Hanging>(std::move(c), fault, where);
      hanging = made.get();
      return made;
    });
    EXPECT_EQ(out.sentences[1], where == Hanging::in_fail ? "the network is down"
                                                          : "a call of the transport has not returned within 1 s");
    for (const std::size_t r : {0u, 2u, 3u})
      EXPECT_NE(out.sentences[r].find("no answer within 1 s from rank"), std::string::npos) << out.sentences[r];
    EXPECT_LT(out.seconds, timeout + 1);
    expect_untouched(out);
    ASSERT_TRUE(hanging->kept);  // nobody else owns it any more
    EXPECT_EQ(hanging->kept.use_count(), 1);
    hanging->let_go();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_EQ(hanging->asked_since, 0);
  };
  std::vector<std::thread> all;  // they wait for most of their time
  for (const auto where : {Hanging::in_start, Hanging::in_test, Hanging::in_notice, Hanging::in_fail})
    all.emplace_back(expect_left_behind, where);
  for (std::thread& one : all) one.join();
}

TEST(OwnThreads, RefuseCallsAfterOneThatHangs) {
  std::shared_ptr<Hanging> hanging;
  run_ranks(2, [&](int r, std::shared_ptr<Communicator> c) {
    const Sharing sharing = sharing_of(small(), 2);
    if (r == 0) hanging = std::make_shared<Hanging>(c, Fault{Fault::fail, 0}, Hanging::in_fail), c = hanging;
    for (const char* sentence : {"the network is down",
                                 "communicator: has failed before (the network is down); make a new one, and a plan "
                                 "with it"}) {
      try {
        Plan(c, small(), sharing);
        ADD_FAILURE() << "was not refused";
      } catch (const Error& error) {
        if (r == 0) {
          EXPECT_STREQ(error.what(), sentence);
        }
      }
    }
  });
}

}  // namespace
}  // namespace tessera::dist
