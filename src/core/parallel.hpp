// parallel_for: independent tasks over a process-wide pool of threads, taken from a shared counter in index order;
// parallel_steps: several such loops, one after the other. Included by CPU-side backends. The caller works too, so a
// call makes progress even if no pool thread is free.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace tessera {

// Threads that a call may use: `asked`, or, for 0, the processors that this process may run on.
int resolve_threads(int asked);

using Task = std::function<void(std::int64_t index, int worker)>;

// Runs task(index, worker) for every index in [0, count), each exactly once. `worker` < threads is the same for all the
// tasks that one thread takes, so it may choose a slice of scratch memory. Returns when all are done; the first
// exception of a task is rethrown. Safe to call from several threads at once and from a forked child.
void parallel_for(std::int64_t count, int threads, Task task);

struct Step {
  std::int64_t count;
  Task task;
};

// parallel_for of each step, whose tasks begin when those of the step before are done. The threads are brought together
// once for all.
void parallel_steps(const std::vector<Step>& steps, int threads);

}  // namespace tessera
