// SPDX-License-Identifier: Apache-2.0
// The threads of an OpenMP runtime that is in the process anyway, PyTorch's for one; docs/cpu_kernels.md, "Threads".
// Included by core/parallel.cpp.
#pragma once

#include <algorithm>
#include <chrono>

namespace tessera {

using Time = std::chrono::steady_clock::duration;  // also of a moment: since the clock's beginning
inline Time time_now() { return std::chrono::steady_clock::now().time_since_epoch(); }

// Calls work(context) on several threads at once, this one among them, and returns when all have returned; work says
// how long it was busy. False, and nothing is done: no runtime is loaded, it would use fewer than `threads` threads, it
// is busy with this thread or with another call from here, waiting for its threads has not paid lately (Patience), two
// other threads have begun regions here, the runtime would have to make threads that the system refuses, the process is
// a forked child, in which such runtimes hang, or $TESSERA_OPENMP is 0. Takes no memory that it cannot do without.
bool run_on_openmp(int threads, Time (*work)(void*), void* context);

// Whether a parallel region of OpenMP pays. Its threads are pinned or stay where they are, and its barrier waits for
// the slowest: on an oversubscribed machine, where another program or virtual machine preempts one of them, all wait
// for milliseconds. The pool has no such barrier: sleeping workers wake on an idle processor, and nobody waits for one
// that has not joined. So when barriers have cost more than the work itself and a bit, no region is begun for a while.
class Patience {
 public:
  static constexpr Time most_lost = std::chrono::milliseconds(20), rest = std::chrono::milliseconds(500),
                        usual = std::chrono::microseconds(500);  // loss that has other reasons: a few long tasks

  bool ended(Time now) const { return now < resume; }

  // Of a region of that many threads, which ended at `now` after `duration`; busy: all their work together.
  void add(Time now, Time duration, Time busy, int threads) {
    const Time work = busy / threads;
    lost = std::max(Time(0), lost + std::max(Time(0), duration - work - usual) - work);
    if (lost < most_lost) return;
    resume = now + rest;
    lost = most_lost / 2;  // one more such wait will do next time
  }

 private:
  Time lost{0}, resume{0};
};

}  // namespace tessera
