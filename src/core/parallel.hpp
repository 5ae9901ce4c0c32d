// SPDX-License-Identifier: Apache-2.0
// parallel_for: independent tasks over a process-wide pool of threads, taken from a shared counter in index order;
// PreparedSteps: several such loops, one after the other. Included by CPU-side backends. The caller works too, so a
// call makes progress even if no pool thread is free, and if none can be made.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace tessera {

// Threads that a call may use: `asked`, or, for 0, the processors that this process may run on.
int resolve_threads(int asked);

using Task = std::function<void(std::int64_t index, int worker)>;

// Runs task(index, worker) for every index in [0, count), each exactly once. `worker` < worker_count(count, threads) is
// the same for all the tasks that one thread takes, so it may choose a slice of scratch memory. Returns when all are
// done; the first exception of a task is rethrown. Safe to call from several threads at once and from a forked child.
void parallel_for(std::int64_t count, int threads, Task task);

int worker_count(std::int64_t count, int threads);

struct Step {
  std::int64_t count;
  Task task;
};

// parallel_for of each step, with a barrier between steps. Threads join once for all of them. All the memory that
// running takes is allocated when the steps are prepared, so that a caller can write its first output knowing that only
// a task may still fail.
class PreparedSteps {
 public:
  PreparedSteps(std::vector<Step> steps, int threads);
  ~PreparedSteps();
  void run();  // once

  struct Job;  // the pool's

 private:
  std::unique_ptr<Job> job;
};

// Prepares and runs.
void parallel_steps(std::vector<Step> steps, int threads);

// In a forked child, where the pool's threads do not exist and its lock may be held for ever: an empty pool.
void forget_pool();

}  // namespace tessera
