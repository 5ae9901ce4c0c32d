// SPDX-License-Identifier: Apache-2.0
// A GPU on the host: the threads of a block as fibers, in random order, and what they do together: barriers, exchanges
// within a warp, asynchronous copies, products of warps and warpgroups, counts in global memory. Blocks run one after
// another, or several at a time. Device code compiled by the host's compiler runs on it; the headers beside this file
// stand in for those of the same name in src/. Included by the tests in tests/sm90, tests/mma, tests/decode and
// tests/ladder that run a kernel's text.
#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "tests/emulated/clusters.hpp"
#include "tests/emulated/language.hpp"

namespace tessera::emulated {

class Machine {
 public:
  static Machine& here() {
    static Machine machine;
    return machine;
  }

  // Runs a kernel's blocks, `resident` at a time, whose first threads are so many producers. Throws if threads wait for
  // each other for ever. `programmatic`: it may start before the launch before it has ended, and waits for that itself.
  void run(int blocks, int threads, int producer_threads, const std::function<void()>& run_kernel,
           bool programmatic = false) {
    gridDim.x = blocks, block_threads = threads, kernel = &run_kernel, failure = nullptr;
    producers = static_cast<std::size_t>(producer_threads);
    block_bytes = std::exchange(shared_bytes, memory_bytes);
    if constexpr (looks_for_races) races.begin_launch(blocks, programmatic);
    std::vector<Block*> unused, &there = clusters.begin_launch();
    for (const auto& one : pool) unused.push_back(one.get());
    block = nullptr;
    for (int next = 0; next < blocks || !there.empty();) {
      while (next < blocks && there.size() < std::max(resident, static_cast<std::size_t>(clusters.blocks))) {
        if (unused.empty()) pool.push_back(std::make_unique<Block>()), unused.push_back(pool.back().get());
        there.push_back(unused.back()), unused.pop_back();
        begin(*there.back(), next++);
      }
      const std::size_t n = there.size() > 1 ? random_turn() % there.size() : 0;
      enter(*there[n]);
      if (run_for_a_while()) {
        require_untouched_end();
        if constexpr (looks_for_races) races.end_block();
        unused.push_back(block), block = nullptr;
        there.erase(there.begin() + static_cast<std::ptrdiff_t>(n));
      } else if (std::all_of(there.begin(), there.end(), [](const Block* b) { return b->waits; })) {
        throw std::runtime_error("all threads of the block wait");
      }
    }
  }

  void wait_until(const std::function<bool()>& done) {
    if (!done()) {
      Thread& thread = own();
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
    Meeting& m = block->meetings[name];
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

  // All threads of the cluster's blocks. Races across blocks' shared memory are not looked for, those of a block are.
  void sync_cluster() {
    meet_in_order(1, block_threads, threadIdx.x);  // beside __syncthreads, 0
    ++progress, wait_until(clusters.meet(*block, block_threads));
  }
  void load_from_block(void* to, UInt32 rank, UInt32 address, std::size_t bytes) {
    const Block& there = clusters.neighbour(*block, static_cast<int>(rank));
    if (&there == block) return load(to, address, bytes);
    require_own(address, bytes);
    copy_quietly([&] { std::memcpy(to, there.saved.data() + address, bytes); });
  }
  int warp_name() const { return 1000 + threadIdx.x / 32; }
  int warpgroup_name() const { return 2000 + threadIdx.x / 128; }

  // The same for a warp, with more than a number each: all lanes' things, until the lane's next exchange but one.
  template <class Thing>
  const Thing* exchange(const Thing& brings) {
    static_assert(std::is_trivially_copyable_v<Thing>);
    const int name = warp_name();
    const auto bytes = sizeof(Thing);
    std::vector<unsigned char>& room = block->exchanged[name].room[block->meetings[name].round % 2];
    if (room.size() < 32 * bytes) room.resize(32 * bytes);
    std::memcpy(&room[static_cast<std::size_t>(threadIdx.x % 32) * bytes], &brings, bytes);
    meet(name, 32, threadIdx.x % 32);
    return reinterpret_cast<const Thing*>(room.data());
  }

  // cp.async: the place holds NaN from now on; the bytes come when the thread waits for their group. A group may have a
  // copy twice: whichever comes last, its bytes are the same.
  void copy_late(const LateCopy& copy) {
    require_own(copy.to, static_cast<std::size_t>(copy.size));
    std::memset(memory + copy.to, 0xff, static_cast<std::size_t>(copy.size));
    auto& group = block->late_copies[current].back();
    const bool again = std::find(group.begin(), group.end(), copy) != group.end();
    group.push_back(copy);
    if constexpr (looks_for_races) {
      const Thread& thread = own();
      const auto look = [&](const void* at, int bytes, Access access) {
        races.access_by(Agent::copies, &thread, thread.copies + 1, current, at, static_cast<std::size_t>(bytes),
                        access);
      };
      look(memory + copy.to, copy.size, again ? Access::same : Access::write);
      if (copy.bytes > 0) look(copy.from, copy.bytes, Access::read);
    }
  }
  void commit_copies() { block->late_copies[current].emplace_back(), ++own().copies; }
  // Until only the latest `pending` groups are on their way; what is not committed is not waited for.
  void wait_copies(int pending) {
    auto& groups = block->late_copies[current];
    for (; static_cast<int>(groups.size()) > pending + 1; groups.pop_front())
      for (const LateCopy& copy : groups.front()) copy.arrive(memory);
    learn(Agent::copies, &own(), own().copies, pending);
    ++progress;
  }

  // wgmma: a product reads its operands at any time from its issue to the wait for its group. Some warpgroups multiply
  // as early as they may, and see what is not there yet; others as late, and see what has been overwritten.
  template <class Product>
  void multiply(const Product& product) {
    const auto read_as_product = [this, product, group = own().products + 1, unjudged = own().unjudged] {
      const bool before = std::exchange(own().unjudged, unjudged);
      own().in_product = group;
      product();
      own().in_product = 0, own().unjudged = before;
    };
    if (multiplies_late())
      block->late_products[current].back().push_back(read_as_product);
    else
      read_as_product();
  }
  void commit_products() { block->late_products[current].emplace_back(), ++own().products; }
  // Whether what is read from here on, products included, is used: what is not may be anything.
  void judge_races(bool judged) { own().unjudged = !judged; }
  // Until only the latest `pending` groups are under way. A product is one of the whole warpgroup: it ends only after
  // all four warps have begun it, and for all of them.
  void wait_products(int pending) {
    meet(warpgroup_name(), 128, threadIdx.x % 128);
    auto& groups = block->late_products[current];
    for (; static_cast<int>(groups.size()) > pending + 1; groups.pop_front())
      for (const auto& product : groups.front()) product();
    if (multiplies_late()) meet(warpgroup_name(), 128, threadIdx.x % 128);
    learn(Agent::products, warpgroup_key(), own().products, pending);
  }

  // What device code reads and writes in the block's memory, and in global memory: called by the functions that stand
  // in for instructions, and by the compiler for everything else (tests/emulated/races.cpp).
  void accesses(const void* at, std::size_t bytes, Access access, const void* code = nullptr) {
    if constexpr (looks_for_races) {
      const Thread& thread = own();
      if (thread.unjudged) return;
      if (thread.in_product)
        races.access_by(Agent::products, warpgroup_key(), thread.in_product, current, at, bytes, access);
      else
        races.access(current, at, bytes, access, code ? code : __builtin_return_address(0));
    }
  }
  bool is_watched(const void* at) const { return in_a_fiber && (is_shared(at) || races.watches(at)); }
  // Global memory whose accesses are looked at from now on, in cells of an element's bytes; nothing from `forget` on.
  void watch(const void* at, std::size_t bytes, std::size_t cell_bytes, const char* name) {
    if constexpr (looks_for_races) races.watch(at, bytes, cell_bytes, name);
  }
  void forget() {
    if constexpr (looks_for_races) races.forget();
  }
  // A count by which blocks only share work out; see Races.
  void tickets(const void* at) {
    if constexpr (looks_for_races) races.tickets(at);
  }

  void load(void* to, UInt64 from, std::size_t bytes) {
    require_own(from, bytes);
    accesses(memory + from, bytes, Access::read);
    copy_quietly([&] { std::memcpy(to, memory + from, bytes); });
  }
  void store(UInt64 to, const void* from, std::size_t bytes) {
    require_own(to, bytes);
    if (looks_for_races)
      accesses(memory + to, bytes, std::memcmp(memory + to, from, bytes) ? Access::write : Access::same);
    copy_quietly([&] { std::memcpy(memory + to, from, bytes); });
  }
  // Atomically; in shared or global memory. `tells`: what was written before it may be known by the new value.
  template <class Change>
  void change(const void* at, std::size_t bytes, bool tells, const Change& change_it) {
    if constexpr (looks_for_races) {
      accesses(at, bytes, Access::atomic);
      if (tells && !is_shared(at)) races.strong(current, at, Races::Strong::change);
    }
    copy_quietly(change_it);
  }

  // --- counts in global memory: fence.sc or fence.acq_rel, ld.relaxed, ld.acquire until a count is there, and
  // fence.acq_rel with red

  void fence(bool sc) {
    if constexpr (looks_for_races) races.fence(current, sc);
  }
  static UInt32 peek(const UInt32* count) { return __atomic_load_n(count, __ATOMIC_RELAXED); }
  UInt32 look_at_count(const UInt32* count) {
    if constexpr (looks_for_races)
      accesses(count, 4, Access::strong_read), races.strong(current, count, Races::Strong::look);
    return peek(count);
  }
  void wait_for_count(const UInt32* count, UInt32 value) {
    wait_until([&] { return peek(count) == value; });
    if constexpr (looks_for_races)
      accesses(count, 4, Access::strong_read), races.strong(current, count, Races::Strong::acquire);
  }
  void count_one_more(UInt32* count) { fence(false), count_behind_fence(count); }
  void count_behind_fence(UInt32* count) {
    if constexpr (looks_for_races) accesses(count, 4, Access::atomic), races.strong(current, count, Races::Strong::add);
    copy_quietly([&] { ++*count; });
    ++progress;
  }
  // griddepcontrol.wait
  void wait_for_launch_before() {
    if constexpr (looks_for_races) races.wait_for_launch_before(current);
  }

  // A bulk copy to the block's memory, which a barrier awaits, and one from there, which the thread may await. The
  // other side's bytes lie at `from`, or are told by `look_at(look)`, in pieces.
  template <class Copy>
  void copy_in(PhaseBarrier& barrier, UInt32 to, int bytes, const Copy& copy, const void* from = nullptr) {
    require_own(to, static_cast<std::size_t>(bytes));
    copy_quietly(copy);
    if constexpr (looks_for_races) {
      const auto look = [&](const void* at, Access access) {
        races.access_by(Agent::bulk_copies, &barrier, barrier.copies, current, at, static_cast<std::size_t>(bytes),
                        access);
      };
      ++barrier.copies, look(memory + to, Access::write);
      if (from) look(from, Access::read);
      races.announce(current, Agent::bulk_copies, &barrier, barrier.copies, barrier.arriving);
    }
  }
  template <class Copy, class LookAt>
  void copy_out(UInt32 from, int bytes, const Copy& copy, const LookAt& look_at) {
    require_own(from, static_cast<std::size_t>(bytes));
    copy_quietly(copy);
    if constexpr (looks_for_races) {
      Thread& thread = own();
      races.access_by(Agent::bulk_stores, &thread, ++thread.stores, current, memory + from,
                      static_cast<std::size_t>(bytes), Access::read);
      look_at([&](const void* to, int size, Access access) {
        races.access_by(Agent::bulk_writes, &thread, thread.stores, current, to, static_cast<std::size_t>(size),
                        access);
      });
    }
  }
  // Until they have read, and until they have written.
  void wait_stores_read() { learn(Agent::bulk_stores, &own(), own().stores, 0); }
  void wait_stores() { wait_stores_read(), learn(Agent::bulk_writes, &own(), own().stores, 0); }
  // fence.proxy.async, of shared memory and of global memory.
  void publish() {
    if constexpr (looks_for_races) races.publish(current);
  }
  void publish_global() {
    if constexpr (looks_for_races) races.publish_global(current);
  }

  PhaseBarrier& phase_barrier(const void* at) { return block->phase_barriers[at]; }
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
  // What the next launch asks for; whoever touches more is in error, as on a GPU. Others ask for all.
  std::size_t shared_bytes = memory_bytes;
  int block_threads = 0;
  std::mt19937 random{1};
  // Blocks that take turns; a kernel's results are the same with any number of them.
  std::size_t resident = looks_for_races ? 3 : 1;
  Clusters clusters;

 private:
  Thread& own() { return block->threads[current]; }
  // Instructions are looked at one by one; what ordinary C++ has written is seen at the end of the block.
  void require_own(UInt64 at, std::size_t bytes) const {
    if (at + bytes > block_bytes) throw std::runtime_error("an access behind the shared memory that was asked for");
  }
  void require_untouched_end() const {
    const std::size_t rest = memory_bytes - block_bytes;  // which is NaN
    if (!memory || rest == 0) return;
    if (memory[block_bytes] != 0xff || std::memcmp(memory + block_bytes, memory + block_bytes + 1, rest - 1) != 0)
      throw std::runtime_error("a write behind the shared memory that was asked for");
  }
  bool is_shared(const void* at) const { return memory && at >= memory && at < memory + memory_bytes; }
  bool multiplies_late() const { return block->late_warpgroups >> threadIdx.x / 128 & 1; }
  const void* warpgroup_key() const { return &block->threads[static_cast<std::size_t>(threadIdx.x / 128 * 128)]; }
  // All but the latest `pending` groups of an agent have ended.
  void learn(Agent agent, const void* key, UInt32 groups, int pending) {
    if constexpr (looks_for_races)
      if (groups > static_cast<UInt32>(pending))
        races.learn(current, agent, key, groups - static_cast<UInt32>(pending));
  }
  template <class Copy>
  void copy_quietly(const Copy& copy) {
    const bool before = std::exchange(own().unjudged, true);
    copy();
    own().unjudged = before;
  }

  static void enter_kernel() {
    Machine& m = here();
    try {
      (*m.kernel)();
    } catch (...) {
      m.failure = std::current_exception();
    }
    m.own().done = true;
    ++m.progress;
    m.own().fiber.leave();
  }

  // --- blocks

  void begin(Block& b, int number) {
    leave();
    b.begin(number, block_threads, &Machine::enter_kernel);
    if (memory) std::memset(memory, 0xff, memory_bytes);  // NaN
    b.late_warpgroups = random_lateness();
    if constexpr (looks_for_races)
      races.begin_block(b.clocks, number, memory, memory ? memory_bytes : 0, block_threads);
    block = &b;
    // One warp, or none, goes on only when all others wait for it: what it was to do in time shows. In every other
    // block producers fill what is given back before any other thread goes on: what was given back too early shows.
    b.slow_warp = random() % ((b.threads.size() + 31) / 32 + 1);
    b.hasty = producers > 0 && ++blocks_with_producers % 2 == 0;
  }
  // The shared memory is one, and the block that runs has it.
  void leave() {
    if (block && memory) block->saved.assign(memory, memory + memory_bytes);
    block = nullptr;
  }
  void enter(Block& b) {
    if (block != &b) {
      leave();
      if (!b.saved.empty()) std::memcpy(memory, b.saved.data(), memory_bytes);
      block = &b;
      if constexpr (looks_for_races) races.enter(b.clocks);
    }
    blockIdx.x = b.number;
  }
  // True: the block has ended. Alone it runs until then, or until all of its threads wait; beside others for a while,
  // so that any of them may be far ahead.
  bool run_for_a_while() {
    Block& b = *block;
    for (unsigned rounds = resident > 1 || clusters.blocks > 1 ? 1u << random_turn() % 8 : ~0u; rounds > 0; --rounds) {
      std::shuffle(b.order.begin(), b.order.end(), random);
      const long before = progress;
      bool running = false;
      for (const std::size_t n : b.order) {
        if (b.threads[n].done) continue;
        running = true;
        if (n / 32 == b.slow_warp && !b.hurry) continue;
        const long ended_before = phases_ended;
        go_on(n);
        if (b.hasty && phases_ended != ended_before) run_producers();
      }
      if (!running) return true;
      b.waits = progress == before && b.hurry;
      if (b.waits) return false;
      b.hurry = progress == before;
      if (progress != before)
        for (const auto& other : pool) other->waits = false;
    }
    return false;
  }

  // False: the thread has ended, or waits.
  bool go_on(std::size_t n) {
    Thread& thread = block->threads[n];
    if (thread.done || (thread.waits_for && !(*thread.waits_for)())) return false;
    current = n, threadIdx.x = static_cast<int>(n);
    in_a_fiber = true;
    thread.fiber.enter();
    in_a_fiber = false;
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
  std::vector<std::unique_ptr<Block>> pool;
  Block* block = nullptr;  // that runs
  std::size_t current = 0, producers = 0, block_bytes = memory_bytes;
  bool in_a_fiber = false;
  const std::function<void()>* kernel = nullptr;
  std::exception_ptr failure;
  long progress = 0, phases_ended = 0, blocks_with_producers = 0;
  std::mt19937 random_lateness{2}, random_turn{3};
};

}  // namespace tessera::emulated

#include "tests/emulated/cuda.hpp"
