// SPDX-License-Identifier: Apache-2.0
// A value that is made at its first use and then lives as long as the process. Included by everything that keeps such a
// value: there are no other static objects with a constructor, see docs/cpu_kernels.md, "Memory that runs out, forks".
#pragma once

#include <atomic>
#include <memory>

namespace tessera {

// A static one is constinit: it needs no guard, so that a child that is forked during somebody's first call does not
// wait for a thread which it does not have. Threads that come first together all make the value, and one of them is
// kept. An exception leaves it unmade: the next to ask tries again. Never destroyed, so nothing is registered for the
// end of the process, which would take memory.
template <class T>
class Once {
 public:
  template <class Make>
  T& get(Make make) {
    if (T* made = value.load(std::memory_order_acquire)) return *made;
    std::unique_ptr<T> fresh(new T(make()));
    T* first = nullptr;
    if (!value.compare_exchange_strong(first, fresh.get(), std::memory_order_acq_rel, std::memory_order_acquire))
      return *first;
    return *fresh.release();
  }

 private:
  std::atomic<T*> value{nullptr};
};

}  // namespace tessera
