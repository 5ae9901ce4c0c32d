// SPDX-License-Identifier: Apache-2.0
// The pool behind parallel_for; see parallel.hpp. Workers sleep on a condition variable between calls. A call ("job")
// hands out the indices of a step from an atomic counter; workers join any job that still has room. Nobody waits for a
// worker that has not joined, so a forked child, whose pool is empty, still finishes every job by itself, and so does a
// process that gets no threads. Where the process has threads of OpenMP, those take the workers' place.
#include "core/parallel.hpp"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "core/fork.hpp"
#include "core/openmp.hpp"
#include "core/spin.hpp"

namespace tessera {

struct PreparedSteps::Job {
  // How far a step is: indices given out, and tasks done.
  struct Progress {
    std::atomic<std::int64_t> next{0}, done{0};
  };

  const std::vector<Step> steps;
  int workers;                     // that may take part
  std::atomic<int> joined{0};      // and do; with the pool, guarded by its mutex
  int active = 0;                  // pool threads inside, guarded by the pool's mutex
  Job* next = nullptr;             // in the pool's list
  std::vector<Progress> progress;  // none for a single worker
  std::atomic<bool> failed{false};
  std::mutex error_mutex{};
  std::exception_ptr error{};

  Job(std::vector<Step> given, int workers) :
      steps(std::move(given)), workers(workers), progress(workers > 1 ? steps.size() : 0) {}

  bool has_tasks_left() const {
    for (std::size_t n = 0; n < steps.size() && !failed; ++n)
      if (progress[n].next.load(std::memory_order_relaxed) < steps[n].count) return true;
    return false;
  }

  // As worker number `worker`, until no index is left. Returns how long it worked.
  Time work(int worker) {
    Time busy{0};
    for (std::size_t n = 0; n < steps.size(); ++n) {
      if (n > 0) wait_for(n - 1);
      const Time begin = time_now();
      work_on(n, worker);
      busy += time_now() - begin;
    }
    return busy;
  }

 private:
  void work_on(std::size_t step, int worker) {
    const auto& [count, task] = steps[step];
    auto& [next, done] = progress[step];
    try {
      for (std::int64_t i; !failed && (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
        task(i, worker);
        done.fetch_add(1, std::memory_order_release);
      }
    } catch (...) {
      const std::lock_guard lock(error_mutex);
      if (!error) error = std::current_exception();
      failed = true;  // the rest is not worth computing
    }
  }

  // All tasks of a step have been taken; those who took them are at work.
  void wait_for(std::size_t step) const {
    spin_until([&] { return progress[step].done.load(std::memory_order_acquire) == steps[step].count || failed; });
  }
};

namespace {

using Job = PreparedSteps::Job;

// On a thread of OpenMP, of which there may be more than workers.
Time join(void* context) {
  Job& job = *static_cast<Job*>(context);
  const int worker = job.joined.fetch_add(1, std::memory_order_relaxed);
  return worker < job.workers ? job.work(worker) : Time(0);
}

// Takes no memory but for its threads. Condition variables of the C library, since they need no destructor.
class Pool {
 public:
  void run(Job& job) noexcept {
    std::unique_lock lock(mutex);
    job.joined = 1;
    Job** end = &jobs;
    while (*end) end = &(*end)->next;
    *end = &job;
    start_workers(job.workers - 1);
    lock.unlock();
    pthread_cond_broadcast(&wake);
    job.work(0);
    lock.lock();
    remove(job);  // nobody joins from here on
    while (job.active > 0) pthread_cond_wait(&left, mutex.native_handle());
  }

 private:
  static constexpr int most_workers = 1023;

  // Threads are made when first asked for and then kept, one less than the largest call wants. If the system refuses
  // one, fewer work.
  void start_workers(int wanted) {
    if (workers >= wanted || !forks_are_noticed()) return;
    pthread_attr_t detached;
    if (pthread_attr_init(&detached) != 0) return;
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    const auto start = [](void* pool) -> void* { static_cast<Pool*>(pool)->serve(); };
    pthread_t thread;
    while (workers < std::min(wanted, most_workers) && pthread_create(&thread, &detached, start, this) == 0) ++workers;
    pthread_attr_destroy(&detached);
  }

  void remove(const Job& job) {
    for (Job** at = &jobs; *at; at = &(*at)->next)
      if (*at == &job) {
        *at = job.next;
        return;
      }
  }

  [[noreturn]] void serve() {
    std::unique_lock lock(mutex);
    for (;;) {
      Job* job = jobs;
      while (job && (job->joined >= job->workers || !job->has_tasks_left())) job = job->next;
      if (!job) {
        pthread_cond_wait(&wake, mutex.native_handle());
        continue;
      }
      ++job->active;
      const int worker = job->joined++;
      lock.unlock();
      job->work(worker);
      lock.lock();
      if (--job->active == 0) pthread_cond_broadcast(&left);
    }
  }

  std::mutex mutex;
  pthread_cond_t wake = PTHREAD_COND_INITIALIZER, left = PTHREAD_COND_INITIALIZER;
  Job* jobs = nullptr;  // the oldest first
  int workers = 0;
};

// Never destroyed: its detached threads may outlive static destruction.
constinit Pool pool;

}  // namespace

void forget_pool() { new (&pool) Pool; }

int resolve_threads(int asked) {
  if (asked > 0) return asked;
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) return std::max(1, CPU_COUNT(&allowed));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

int worker_count(std::int64_t count, int threads) {
  return static_cast<int>(std::max<std::int64_t>(1, std::min<std::int64_t>(count, threads)));
}

void parallel_for(std::int64_t count, int threads, Task task) {
  std::vector<Step> steps;
  steps.push_back({count, std::move(task)});
  parallel_steps(std::move(steps), threads);
}

PreparedSteps::PreparedSteps(std::vector<Step> steps, int threads) {
  std::int64_t widest = 0;
  for (const Step& step : steps) widest = std::max(widest, step.count);
  job = std::make_unique<Job>(std::move(steps), worker_count(widest, threads));
}

PreparedSteps::~PreparedSteps() = default;

void PreparedSteps::run() {
  if (job->workers == 1) {
    for (const Step& step : job->steps)
      for (std::int64_t i = 0; i < step.count; ++i) step.task(i, 0);
    return;
  }
  if (!run_on_openmp(job->workers, join, job.get())) pool.run(*job);
  if (job->error) std::rethrow_exception(job->error);
}

void parallel_steps(std::vector<Step> steps, int threads) { PreparedSteps(std::move(steps), threads).run(); }

}  // namespace tessera
