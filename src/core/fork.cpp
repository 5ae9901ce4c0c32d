// SPDX-License-Identifier: Apache-2.0
// Noticing forks; see fork.hpp.
#include "core/fork.hpp"

#include <pthread.h>

#include <atomic>

#include "core/parallel.hpp"

namespace tessera {
namespace {

constinit std::atomic<unsigned> forks{0};
constinit std::atomic<bool> noticed{false};

// The child has one thread, so nobody looks while this happens.
void begin_child() {
  ++forks;
  forget_pool();
}

// From the moment when the library is loaded: OpenMP may have been used before the first call.
[[maybe_unused]] const bool at_load = forks_are_noticed();

}  // namespace

unsigned fork_count() { return forks.load(std::memory_order_relaxed); }

bool forks_are_noticed() {
  if (noticed.load(std::memory_order_relaxed)) return true;
  // Two threads that come here together register it twice, which does no harm but to the count.
  if (pthread_atfork(nullptr, nullptr, begin_child) != 0) return false;
  noticed = true;
  return true;
}

}  // namespace tessera
