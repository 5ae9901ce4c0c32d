// SPDX-License-Identifier: Apache-2.0
// A thread that can be left behind; see worker.hpp.
#include "dist/worker.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <ctime>
#include <mutex>
#include <new>
#include <system_error>
#include <utility>

#include "tessera/tessera.hpp"

namespace tessera::dist {
namespace {

// How often the caller looks, and how long a call may take beyond what it was allowed: a machine that is busy may leave
// a thread without a processor. Together well below the second in which a failure must have its sentence.
constexpr std::chrono::milliseconds tick{25}, grace{300};

constexpr std::uint64_t left_behind = ~std::uint64_t(0);

// The program's signals are for its own threads. A fault comes to the thread that makes it, whatever it blocks.
class WithoutSignals {
 public:
  WithoutSignals() {
    sigset_t all;
    sigfillset(&all);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&all, fault);
    pthread_sigmask(SIG_BLOCK, &all, &before);
  }
  ~WithoutSignals() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
  WithoutSignals(const WithoutSignals&) = delete;
  WithoutSignals& operator=(const WithoutSignals&) = delete;

 private:
  sigset_t before{};
};

// std::condition_variable waits for a moment of a steady clock by a function that is younger than the oldest glibc for
// which wheels are linked.
class Bell {
 public:
  Bell() {
    pthread_condattr_t steady;
    pthread_condattr_init(&steady);
    pthread_condattr_setclock(&steady, CLOCK_MONOTONIC);
    pthread_cond_init(&condition, &steady);
    pthread_condattr_destroy(&steady);
  }
  ~Bell() { pthread_cond_destroy(&condition); }
  Bell(const Bell&) = delete;
  Bell& operator=(const Bell&) = delete;

  void ring() { pthread_cond_signal(&condition); }
  void wait(std::unique_lock<std::mutex>& lock) { pthread_cond_wait(&condition, lock.mutex()->native_handle()); }
  void wait_one_tick(std::unique_lock<std::mutex>& lock) {
    timespec until{};
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += std::chrono::nanoseconds(tick).count();
    if (until.tv_nsec >= 1'000'000'000) until.tv_nsec -= 1'000'000'000, ++until.tv_sec;
    pthread_cond_timedwait(&condition, lock.mutex()->native_handle(), &until);
  }

 private:
  pthread_cond_t condition;
};

}  // namespace

// Owned by the caller's side and by the thread.
struct Worker::State {
  std::mutex mutex;
  Bell wake, finished;
  const std::function<void()>* body = nullptr;  // to be run
  bool done = false, ending = false;
  std::exception_ptr error;

  // Odd while the thread is inside a call; one more whenever it enters or leaves one. The caller sets it to left_behind
  // while the thread is inside; a thread that leaves then finds out.
  std::atomic<std::uint64_t> calls{0};
  std::atomic<Clock::rep> allowed{0};  // of the call that it is inside

  void serve() {
    std::unique_lock lock(mutex);
    for (;;) {
      while (!body && !ending) wake.wait(lock);
      if (ending) return;
      lock.unlock();
      std::exception_ptr thrown;
      try {
        (*body)();
      } catch (...) {
        thrown = std::current_exception();
      }
      lock.lock();
      body = nullptr, error = std::move(thrown), done = true;
      finished.ring();
    }
  }
};

Worker::Worker() : state(std::make_shared<State>()), process(getpid()) {
  const WithoutSignals inherited;
  try {
    thread = std::thread([kept = state] { kept->serve(); });
  } catch (const std::system_error&) {
    throw std::bad_alloc();
  }
}

Worker::~Worker() {
  if (process != getpid()) {  // a forked child, in which there is no such thread
    thread.detach();
    return;
  }
  {
    const std::lock_guard lock(state->mutex);
    state->ending = true;
    state->wake.ring();
  }
  thread.join();
}

// A process that was stopped, perhaps with the whole job, finds that much time has passed when it goes on: each look
// counts for two ticks at most.
void Worker::run(const std::function<void()>& body) {
  if (process != getpid())
    throw Error(TESSERA_INVALID_ARGUMENT,
                "communicator: was made before this process was forked, and its thread is the parent's; make one here");
  State& s = *state;
  std::unique_lock lock(s.mutex);
  s.body = &body, s.done = false;
  s.wake.ring();
  std::uint64_t seen = 0;
  Clock::duration inside{};
  Clock::time_point last = Clock::now();
  for (s.finished.wait_one_tick(lock); !s.done; s.finished.wait_one_tick(lock)) {
    const Clock::time_point now = Clock::now();
    std::uint64_t call = s.calls.load(std::memory_order_acquire);
    const bool same = call % 2 == 1 && call == seen;
    inside = same ? inside + std::min<Clock::duration>(now - last, 2 * tick) : Clock::duration{};
    seen = call, last = now;
    const Clock::duration most = Clock::duration(s.allowed.load(std::memory_order_relaxed)) + grace;
    if (same && inside > most && s.calls.compare_exchange_strong(call, left_behind)) throw Stuck{};
  }
  lock.unlock();
  if (s.error) std::rethrow_exception(std::exchange(s.error, nullptr));
}

Worker::Call::Call(const Worker* worker, Clock::duration allowed) : state(worker ? worker->state.get() : nullptr) {
  if (!state) return;
  state->allowed.store(allowed.count(), std::memory_order_relaxed);
  state->calls.fetch_add(1, std::memory_order_release);
}

Worker::Call::~Call() {
  if (!state) return;
  std::uint64_t call = state->calls.load(std::memory_order_relaxed);
  if (call != left_behind && state->calls.compare_exchange_strong(call, call + 1)) return;
  for (;;) pause();  // the caller has gone on without this thread
}

}  // namespace tessera::dist
