// The pool behind parallel_for; see parallel.hpp. Workers sleep on a condition variable between calls. A call ("job")
// hands out indices from an atomic counter; workers join any job that still has room. The caller never waits for a
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

#include "core/openmp.hpp"

namespace tessera {
namespace {

struct Job {
  const std::function<void(std::int64_t, int)>* task;
  std::int64_t count;
  int workers;                 // that may take part
  std::atomic<int> joined{0};  // and do; with the pool, guarded by its mutex
  int active = 0;              // pool threads inside, guarded by the pool's mutex
  std::atomic<std::int64_t> next{0};
  std::mutex error_mutex{};
  std::exception_ptr error{};

  // As worker number `worker`, until no index is left.
  void work(int worker) {
    try {
      for (std::int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) (*task)(i, worker);
    } catch (...) {
      const std::lock_guard lock(error_mutex);
      if (!error) error = std::current_exception();
      next.store(count, std::memory_order_relaxed);  // the rest is not worth computing
    }
  }
};

// On a thread of OpenMP, of which there may be more than workers.
void join(void* context) {
  Job& job = *static_cast<Job*>(context);
  const int worker = job.joined.fetch_add(1, std::memory_order_relaxed);
  if (worker < job.workers) job.work(worker);
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
      const auto open = std::find_if(jobs.begin(), jobs.end(), [](const Job* job) {
        return job->joined < job->workers && job->next.load(std::memory_order_relaxed) < job->count;
      });
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

void parallel_for(std::int64_t count, int threads, const std::function<void(std::int64_t, int)>& task) {
  if (threads <= 1 || count <= 1) {
    for (std::int64_t i = 0; i < count; ++i) task(i, 0);
    return;
  }
  Job job{.task = &task, .count = count, .workers = static_cast<int>(std::min<std::int64_t>(count, threads))};
  if (!run_on_openmp(job.workers, join, &job)) pool().run(job);
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace tessera
