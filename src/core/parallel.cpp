// The pool behind parallel_steps; see parallel.hpp. Workers sleep on a condition variable between calls. A call ("job")
// hands out the indices of a step from an atomic counter; workers join any job that still has room. Nobody waits for a
// worker that has not joined, so a forked child, whose pool is empty, still finishes every job by itself. Where the
// process has threads of OpenMP, those take the workers' place.
#include "core/parallel.hpp"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <list>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/openmp.hpp"
#include "core/spin.hpp"

namespace tessera {
namespace {

// How far a step is: indices given out, and tasks done.
struct Progress {
  std::atomic<std::int64_t> next{0}, done{0};
};

struct Job {
  const std::vector<Step>& steps;
  int workers;                 // that may take part
  std::atomic<int> joined{0};  // and do; with the pool, guarded by its mutex
  int active = 0;              // pool threads inside, guarded by the pool's mutex
  std::vector<Progress> progress;
  std::atomic<bool> failed{false};
  std::mutex error_mutex{};
  std::exception_ptr error{};

  Job(const std::vector<Step>& steps, int workers) : steps(steps), workers(workers), progress(steps.size()) {}

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

// On a thread of OpenMP, of which there may be more than workers.
Time join(void* context) {
  Job& job = *static_cast<Job*>(context);
  const int worker = job.joined.fetch_add(1, std::memory_order_relaxed);
  return worker < job.workers ? job.work(worker) : Time(0);
}

class Pool {
 public:
  void run(Job& job) {
    std::unique_lock lock(mutex);
    job.joined = 1;
    jobs.push_back(&job);
    start_workers(job.workers - 1);
    lock.unlock();
    wake.notify_all();
    job.work(0);
    lock.lock();
    jobs.remove(&job);  // nobody joins from here on
    left.wait(lock, [&] { return job.active == 0; });
  }

 private:
  // Threads are made when first asked for and then kept. If the system refuses one, fewer work.
  void start_workers(int wanted) {
    while (workers < std::min(wanted, 1024)) {
      try {
        std::thread([this] { serve(); }).detach();
      } catch (const std::system_error&) {
        return;
      }
      ++workers;
    }
  }

  void serve() {
    std::unique_lock lock(mutex);
    for (;;) {
      const auto open = std::find_if(
          jobs.begin(), jobs.end(), [](const Job* job) { return job->joined < job->workers && job->has_tasks_left(); });
      if (open == jobs.end()) {
        wake.wait(lock);
        continue;
      }
      Job& job = **open;
      ++job.active;
      const int worker = job.joined++;
      lock.unlock();
      job.work(worker);
      lock.lock();
      if (--job.active == 0) left.notify_all();
    }
  }

  std::mutex mutex;
  std::condition_variable wake, left;
  std::list<Job*> jobs;
  int workers = 0;
};

// Never destroyed: its detached threads may outlive static destruction. Replaced in a forked child, where the threads
// do not exist and the mutex may be locked for ever.
std::atomic<Pool*> the_pool{nullptr};

Pool& pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    the_pool = new Pool;
    pthread_atfork(nullptr, nullptr, [] { the_pool = new Pool; });
  });
  return *the_pool;
}

}  // namespace

int resolve_threads(int asked) {
  if (asked > 0) return asked;
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) return std::max(1, CPU_COUNT(&allowed));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

void parallel_for(std::int64_t count, int threads, Task task) { parallel_steps({{count, std::move(task)}}, threads); }

void parallel_steps(const std::vector<Step>& steps, int threads) {
  std::int64_t widest = 0;
  for (const Step& step : steps) widest = std::max(widest, step.count);
  if (threads <= 1 || widest <= 1) {
    for (const Step& step : steps)
      for (std::int64_t i = 0; i < step.count; ++i) step.task(i, 0);
    return;
  }
  Job job(steps, static_cast<int>(std::min<std::int64_t>(widest, threads)));
  if (!run_on_openmp(job.workers, join, &job)) pool().run(job);
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace tessera
