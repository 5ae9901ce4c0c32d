// SPDX-License-Identifier: Apache-2.0
// A block of threads on the emulated machine: fibers, where they meet, and what is under way for them. Included by
// tests/emulated/machine.hpp.
#pragma once

#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <vector>

#include "math/types.hpp"
#include "tests/emulated/fiber.hpp"
#include "tests/emulated/races.hpp"

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

// cp.async: the first `bytes` of memory are copied, the others are 0.
struct LateCopy {
  UInt32 to;
  const void* from;
  int size, bytes;
  void arrive(unsigned char* memory) const {
    std::memset(memory + to, 0, static_cast<std::size_t>(size));
    std::memcpy(memory + to, from, static_cast<std::size_t>(bytes));
  }
  bool operator==(const LateCopy&) const = default;
};

struct Thread {
  Fiber fiber;
  const std::function<bool()>* waits_for = nullptr;
  bool done = false;
  UInt32 copies = 0, products = 0;  // groups that it has committed
  UInt32 stores = 0;                // that it has begun
  UInt32 in_product = 0;            // of this group, or 0
  bool unjudged = false;            // what is read or written does not count
};

struct Block {
  int number = 0;
  std::vector<Thread> threads;  // they keep their stacks from block to block
  std::map<int, Meeting> meetings;
  std::map<const void*, PhaseBarrier> phase_barriers;
  struct Exchanged {
    std::vector<unsigned char> room[2];
  };
  std::map<int, Exchanged> exchanged;  // by warp
  // Of each thread, by group; the last is not committed.
  std::vector<std::deque<std::vector<LateCopy>>> late_copies;
  std::vector<std::deque<std::vector<std::function<void()>>>> late_products;
  std::mt19937::result_type late_warpgroups = 0;  // a bit for each

  std::vector<std::size_t> order;  // of its threads
  std::size_t slow_warp = 0;       // goes on only when all others wait for it; or none
  bool hasty = false, hurry = false;
  bool waits = false;                // all of its threads do, unless another block has gone on since
  std::vector<unsigned char> saved;  // its shared memory, while another block runs
  BlockClocks clocks;

  void begin(int block_number, int count, void (*entry)()) {
    number = block_number, hurry = waits = false;
    meetings.clear(), phase_barriers.clear(), exchanged.clear(), saved.clear();
    late_copies.assign(static_cast<std::size_t>(count), {{}});
    late_products.assign(static_cast<std::size_t>(count), {{}});
    threads.resize(static_cast<std::size_t>(count));
    for (Thread& thread : threads) {
      thread.done = false, thread.waits_for = nullptr;
      thread.copies = thread.products = thread.stores = thread.in_product = 0;
      thread.unjudged = false;
      thread.fiber.begin(entry);
    }
    order.resize(threads.size());
    for (std::size_t n = 0; n < order.size(); ++n) order[n] = n;
  }
};

}  // namespace tessera::emulated
