// SPDX-License-Identifier: Apache-2.0
// A multiprocessor on the host: the threads of a block as fibers, in random order, and what they do together: barriers,
// exchanges within a warp, asynchronous copies, products of warps and warpgroups. Device code compiled by the host's
// compiler runs on it; the headers beside this file stand in for those of the same name in src/. Included by the tests
// in tests/sm90, tests/mma, tests/decode and tests/ladder that run a kernel's text.
#pragma once

#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "math/types.hpp"
#include "tests/emulated/fiber.hpp"
#include "tests/emulated/races.hpp"

// --- what CUDA C++ has and C++ has not

#define __host__
#define __device__
#define __shared__
#define __align__(bytes) __attribute__((aligned(bytes)))

struct ThreadPlace {
  int x = 0;
};
inline ThreadPlace threadIdx, blockIdx, gridDim;

struct uint4 {
  unsigned x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};

namespace tessera::emulated {

// Threads that wait for each other: all leave after all have come. What each brought stays until the next meeting.
struct Meeting {
  int size = 0, inside = 0, round = 0;
  std::vector<UInt64> brought[2];
  Clock done[2];  // before it, by those who came
};

// mbarrier: a phase ends when `count` arrivals and all announced bytes are in.
struct PhaseBarrier {
  int count = 0, arrived = 0, bytes = 0;
  UInt32 phase = 0;
  bool awaited = true;  // a thread has waited for the latest phase to end
  UInt32 copies = 0;    // asynchronous ones that have ended here
  Clock arriving, ended;
};

class Machine {
 public:
  static Machine& here() {
    static Machine machine;
    return machine;
  }

  // Runs a kernel's blocks one after another, whose first threads are so many producers. Throws if a block's threads
  // wait for each other for ever.
  void run(int blocks, int threads, int producer_threads, const std::function<void()>& kernel) {
    gridDim.x = blocks;
    producers = static_cast<std::size_t>(producer_threads);
    for (int b = 0; b < blocks; ++b) {
      blockIdx.x = b;
      if (memory) std::memset(memory, 0xff, memory_bytes);  // NaN
      meetings.clear(), phase_barriers.clear(), exchanged.clear();
      late_copies.assign(static_cast<std::size_t>(threads), {{}});
      late_products.assign(static_cast<std::size_t>(threads), {{}});
      late_warpgroups = random_lateness();
      if constexpr (looks_for_races) races.begin_block(memory, memory ? memory_bytes : 0, threads);
      run_block(threads, kernel);
      if constexpr (looks_for_races) races.end_block();
    }
  }

  void wait_until(const std::function<bool()>& done) {
    if (!done()) {
      Thread& thread = threads[current];
      thread.waits_for = &done;
      thread.fiber.leave();
      thread.waits_for = nullptr;
    }
    ++progress;
  }

  // Meets the other threads of group `name`; returns what all of them brought, by their number in the group. It orders
  // their accesses to memory (barriers do) or not (exchanges between registers do not).
  enum class Order { none, memory };
  const std::vector<UInt64>& meet(int name, int size, int number, UInt64 brings = 0, Order order = Order::none) {
    Meeting& m = meetings[name];
    m.size = size;
    const int round = m.round;
    if constexpr (looks_for_races) {
      if (m.inside == 0) m.done[round % 2] = {};
      if (order == Order::memory) races.release(current, m.done[round % 2]);
    }
    std::vector<UInt64>& values = m.brought[round % 2];
    values.resize(static_cast<std::size_t>(size));
    values[static_cast<std::size_t>(number)] = brings;
    ++progress;
    if (++m.inside == size) m.inside = 0, ++m.round;
    wait_until([&] { return m.round != round; });
    if constexpr (looks_for_races)
      if (order == Order::memory) races.acquire(current, m.done[round % 2]);
    return values;
  }
  void meet_in_order(int name, int size, int number) { meet(name, size, number, 0, Order::memory); }
  int warp_name() const { return 1000 + threadIdx.x / 32; }
  int warpgroup_name() const { return 2000 + threadIdx.x / 128; }

  // The same for a warp, with more than a number each: all lanes' things, until the lane's next exchange but one.
  template <class Thing>
  const Thing* exchange(const Thing& brings) {
    static_assert(std::is_trivially_copyable_v<Thing>);
    const int name = warp_name();
    const auto bytes = sizeof(Thing);
    std::vector<unsigned char>& room = exchanged[name].room[meetings[name].round % 2];
    if (room.size() < 32 * bytes) room.resize(32 * bytes);
    std::memcpy(&room[static_cast<std::size_t>(threadIdx.x % 32) * bytes], &brings, bytes);
    meet(name, 32, threadIdx.x % 32);
    return reinterpret_cast<const Thing*>(room.data());
  }

  // cp.async: the place holds NaN from now on; the bytes come when the thread waits for their group.
  struct LateCopy {
    UInt32 to;
    const void* from;
    int size, bytes;  // of memory, the first `bytes` are copied, the others are 0
  };
  void copy_late(const LateCopy& copy) {
    std::memset(memory + copy.to, 0xff, static_cast<std::size_t>(copy.size));
    late_copies[current].back().push_back(copy);
    if constexpr (looks_for_races) {
      const Thread& thread = threads[current];
      races.access_by(Agent::copies, &thread, thread.copies + 1, current, memory + copy.to,
                      static_cast<std::size_t>(copy.size), Access::write);
    }
  }
  void commit_copies() { late_copies[current].emplace_back(), ++threads[current].copies; }
  // Until only the latest `pending` groups are on their way; what is not committed is not waited for.
  void wait_copies(int pending) {
    auto& groups = late_copies[current];
    for (; static_cast<int>(groups.size()) > pending + 1; groups.pop_front())
      for (const LateCopy& copy : groups.front()) {
        std::memset(memory + copy.to, 0, static_cast<std::size_t>(copy.size));
        std::memcpy(memory + copy.to, copy.from, static_cast<std::size_t>(copy.bytes));
      }
    learn(Agent::copies, &threads[current], threads[current].copies, pending);
    ++progress;
  }

  // wgmma: a product reads its operands at any time from its issue to the wait for its group. Some warpgroups multiply
  // as early as they may, and see what is not there yet; others as late, and see what has been overwritten.
  template <class Product>
  void multiply(const Product& product) {
    const auto read_as_product = [this, product, group = threads[current].products + 1,
                                  unjudged = threads[current].unjudged] {
      const bool before = std::exchange(threads[current].unjudged, unjudged);
      threads[current].in_product = group;
      product();
      threads[current].in_product = 0, threads[current].unjudged = before;
    };
    if (multiplies_late())
      late_products[current].back().push_back(read_as_product);
    else
      read_as_product();
  }
  void commit_products() { late_products[current].emplace_back(), ++threads[current].products; }
  // Whether what is read from here on, products included, is used: what is not may be anything.
  void judge_races(bool judged) { threads[current].unjudged = !judged; }
  // Until only the latest `pending` groups are under way. A product is one of the whole warpgroup: it ends only after
  // all four warps have begun it, and for all of them.
  void wait_products(int pending) {
    meet(warpgroup_name(), 128, threadIdx.x % 128);
    auto& groups = late_products[current];
    for (; static_cast<int>(groups.size()) > pending + 1; groups.pop_front())
      for (const auto& product : groups.front()) product();
    if (multiplies_late()) meet(warpgroup_name(), 128, threadIdx.x % 128);
    learn(Agent::products, warpgroup_key(), threads[current].products, pending);
  }

  // What device code reads and writes in the block's memory: called by the functions that stand in for instructions,
  // and by the compiler for everything else (tests/emulated/races.cpp).
  void accesses(const void* at, std::size_t bytes, Access access, const void* code = nullptr) {
    if constexpr (looks_for_races) {
      const Thread& thread = threads[current];
      if (thread.unjudged) return;
      if (thread.in_product)
        races.access_by(Agent::products, warpgroup_key(), thread.in_product, current, at, bytes, access);
      else
        races.access(current, at, bytes, access, code ? code : __builtin_return_address(0));
    }
  }
  void load(void* to, UInt64 from, std::size_t bytes) {
    accesses(memory + from, bytes, Access::read);
    copy_quietly([&] { std::memcpy(to, memory + from, bytes); });
  }
  void store(UInt64 to, const void* from, std::size_t bytes) {
    if (looks_for_races)
      accesses(memory + to, bytes, std::memcmp(memory + to, from, bytes) ? Access::write : Access::same);
    copy_quietly([&] { std::memcpy(memory + to, from, bytes); });
  }
  // Atomically; in shared or global memory.
  template <class Change>
  void change(const void* at, std::size_t bytes, const Change& change_it) {
    if (looks_for_races && at >= watched_begin && at < watched_end) accesses(at, bytes, Access::atomic);
    copy_quietly(change_it);
  }
  // A bulk copy to the block's memory, which a barrier awaits, and one from there, which the thread may await.
  template <class Copy>
  void copy_in(PhaseBarrier& barrier, UInt32 to, int bytes, const Copy& copy) {
    copy_quietly(copy);
    if constexpr (looks_for_races) {
      races.access_by(Agent::bulk_copies, &barrier, ++barrier.copies, current, memory + to,
                      static_cast<std::size_t>(bytes), Access::write);
      races.announce(current, Agent::bulk_copies, &barrier, barrier.copies, barrier.arriving);
    }
  }
  template <class Copy>
  void copy_out(UInt32 from, int bytes, const Copy& copy) {
    copy_quietly(copy);
    if constexpr (looks_for_races) {
      Thread& thread = threads[current];
      races.access_by(Agent::bulk_stores, &thread, ++thread.stores, current, memory + from,
                      static_cast<std::size_t>(bytes), Access::read);
    }
  }
  void wait_stores() { learn(Agent::bulk_stores, &threads[current], threads[current].stores, 0); }
  void publish() {
    if constexpr (looks_for_races) races.publish(current);
  }

  PhaseBarrier& phase_barrier(const void* at) { return phase_barriers[at]; }
  void arrive(PhaseBarrier& b) {
    if constexpr (looks_for_races) races.release(current, b.arriving);
    ++b.arrived, settle(b);
  }
  template <class Ended>
  void wait(PhaseBarrier& b, const Ended& has_ended) {
    wait_until(has_ended);
    b.awaited = true;
    if constexpr (looks_for_races) races.acquire(current, b.ended);
  }
  void settle(PhaseBarrier& b) {
    ++progress;
    if (b.arrived > b.count) throw std::runtime_error("a barrier has more arrivals than it counts");
    if (b.arrived != b.count || b.bytes != 0) return;
    // One of several that arrives twice stands for another that has not arrived.
    if (b.count > 1 && !b.awaited)
      throw std::runtime_error("a barrier's phase ends before anybody has waited for the one before");
    b.arrived = 0, ++b.phase, ++phases_ended, b.awaited = false;
    if constexpr (looks_for_races) b.ended = b.arriving;
  }

  static constexpr std::size_t memory_bytes = 232448;
  unsigned char* memory = nullptr;  // of the block; null: its kernels have none
  int block_threads = 0;
  std::mt19937 random{1};

 private:
  bool multiplies_late() const { return late_warpgroups >> threadIdx.x / 128 & 1; }

  struct Thread {
    Fiber fiber;
    const std::function<bool()>* waits_for = nullptr;
    bool done = false;
    UInt32 copies = 0, products = 0;  // groups that it has committed
    UInt32 stores = 0;                // that it has begun
    UInt32 in_product = 0;            // of this group, or 0
    bool unjudged = false;            // what is read or written does not count
  };
  const void* warpgroup_key() const { return &threads[static_cast<std::size_t>(threadIdx.x / 128 * 128)]; }
  // All but the latest `pending` groups of an agent have ended.
  void learn(Agent agent, const void* key, UInt32 groups, int pending) {
    if constexpr (looks_for_races)
      if (groups > static_cast<UInt32>(pending))
        races.learn(current, agent, key, groups - static_cast<UInt32>(pending));
  }
  template <class Copy>
  void copy_quietly(const Copy& copy) {
    const bool before = std::exchange(threads[current].unjudged, true);
    copy();
    threads[current].unjudged = before;
  }

  static void enter() {
    Machine& m = here();
    try {
      (*m.kernel)();
    } catch (...) {
      m.failure = std::current_exception();
    }
    m.threads[m.current].done = true;
    ++m.progress;
    m.threads[m.current].fiber.leave();
  }

  void run_block(int count, const std::function<void()>& run) {
    kernel = &run, block_threads = count, failure = nullptr;
    threads.resize(static_cast<std::size_t>(count));  // they keep their stacks from block to block
    for (Thread& thread : threads) {
      thread.done = false, thread.waits_for = nullptr;
      thread.copies = thread.products = thread.stores = thread.in_product = 0;
      thread.unjudged = false;
      thread.fiber.begin(&Machine::enter);
    }
    std::vector<std::size_t> order(threads.size());
    for (std::size_t n = 0; n < order.size(); ++n) order[n] = n;
    // One warp, or none, goes on only when all others wait for it: what it was to do in time shows. In every other
    // block producers fill what is given back before any other thread goes on: what was given back too early shows.
    const std::size_t warps = (threads.size() + 31) / 32, slow = random() % (warps + 1);
    const bool hasty = producers > 0 && ++blocks_with_producers % 2 == 0;
    for (bool running = true, hurry = false; running;) {
      std::shuffle(order.begin(), order.end(), random);
      const long before = progress;
      running = false;
      for (const std::size_t n : order) {
        if (threads[n].done) continue;
        running = true;
        if (n / 32 == slow && !hurry) continue;
        const long ended_before = phases_ended;
        go_on(n);
        if (hasty && phases_ended != ended_before) run_producers();
      }
      if (running && progress == before && hurry) throw std::runtime_error("all threads of the block wait");
      hurry = progress == before;
    }
  }

  // False: the thread has ended, or waits.
  bool go_on(std::size_t n) {
    Thread& thread = threads[n];
    if (thread.done || (thread.waits_for && !(*thread.waits_for)())) return false;
    current = n, threadIdx.x = static_cast<int>(n);
    thread.fiber.enter();
    if (failure) std::rethrow_exception(failure);
    if (looks_for_races && !races.found.empty()) throw std::runtime_error(std::exchange(races.found, {}));
    return true;
  }
  void run_producers() {
    for (bool any = true; any;) {
      any = false;
      for (std::size_t n = 0; n < producers; ++n) any |= go_on(n);
    }
  }

  Races races;
  std::vector<Thread> threads;
  std::size_t current = 0, producers = 0;
  const std::function<void()>* kernel = nullptr;
  std::exception_ptr failure;
  long progress = 0, phases_ended = 0, blocks_with_producers = 0;
  std::map<int, Meeting> meetings;
  std::map<const void*, PhaseBarrier> phase_barriers;
  struct Exchanged {
    std::vector<unsigned char> room[2];
  };
  std::map<int, Exchanged> exchanged;  // by warp
  // Of each thread, by group; the last is not committed.
  std::vector<std::deque<std::vector<LateCopy>>> late_copies;
  std::vector<std::deque<std::vector<std::function<void()>>>> late_products;
  std::mt19937 random_lateness{2};
  std::mt19937::result_type late_warpgroups = 0;  // a bit for each
};

}  // namespace tessera::emulated

// --- CUDA's functions that device code calls

inline void __syncthreads() {
  auto& m = tessera::emulated::Machine::here();
  m.meet_in_order(0, m.block_threads, threadIdx.x);
}

inline bool __syncthreads_or(bool x) {
  auto& m = tessera::emulated::Machine::here();
  for (const tessera::UInt64 one :
       m.meet(0, m.block_threads, threadIdx.x, x, tessera::emulated::Machine::Order::memory))
    if (one) return true;
  return false;
}

// What lane `from` of the warp brings.
template <class Number>
inline Number shuffled(Number x, int from) {
  auto& m = tessera::emulated::Machine::here();
  tessera::UInt64 bits = 0;
  std::memcpy(&bits, &x, sizeof(x));
  bits = m.meet(m.warp_name(), 32, threadIdx.x % 32, bits)[static_cast<std::size_t>(from)];
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
template <class Number>
inline Number __shfl_sync(unsigned, Number x, int from) {
  return shuffled(x, from);
}
template <class Number>
inline Number __shfl_xor_sync(unsigned, Number x, int distance) {
  return shuffled(x, threadIdx.x % 32 ^ distance);
}

inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }

inline void __syncwarp() {
  auto& m = tessera::emulated::Machine::here();
  m.meet_in_order(m.warp_name(), 32, threadIdx.x % 32);
}

template <class Number, class Change>
inline Number changed_at_once(Number* at, const Change& change) {
  Number before{};
  tessera::emulated::Machine::here().change(at, sizeof(Number), [&] { before = *at, *at = change(before); });
  return before;
}
inline unsigned atomicAdd(unsigned* at, unsigned x) {
  return changed_at_once(at, [&](unsigned before) { return before + x; });
}
inline float atomicAdd(float* at, float x) {
  return changed_at_once(at, [&](float before) { return before + x; });
}
inline int atomicOr(int* at, int x) {
  return changed_at_once(at, [&](int before) { return before | x; });
}
// Blocks run one after another, and see what those before them wrote.
inline void __threadfence() {}
template <class Thing>
inline Thing __ldcg(const Thing* at) {
  return *at;
}

inline bool __any_sync(unsigned, bool x) {
  auto& m = tessera::emulated::Machine::here();
  for (const tessera::UInt64 one : m.meet(m.warp_name(), 32, threadIdx.x % 32, x))
    if (one) return true;
  return false;
}
