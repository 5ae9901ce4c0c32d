// SPDX-License-Identifier: Apache-2.0
// The search for races in global memory: blocks and launches that are ordered, and the same without what orders them.
// One block's shared memory is tests/unit/races_test.cpp's part. Implements docs/testing.md, "Races".
#include <gtest/gtest.h>

#include <string>

#include "tests/emulated/machine.hpp"
// The machine comes first: device code needs it.
#include "gpu/kernel/copy.cuh"
#include "sm90/ptx/barrier.cuh"
#include "sm90/ptx/memory.cuh"
#include "sm90/ptx/tma.cuh"

namespace tessera::emulated {
namespace {

alignas(1024) unsigned char memory[Machine::memory_bytes];

// In global memory.
struct Global {
  alignas(16) float data[192] = {};
  UInt32 count = 0, taken = 0;
};
Global global;

float* shared_numbers() { return reinterpret_cast<float*>(memory); }
sm90::Barrier& barrier() { return *reinterpret_cast<sm90::Barrier*>(memory + 4096); }
volatile float sink;

// What is found in many orders of the threads and blocks when `launches` is called; "" if nothing.
template <class Launches>
std::string found_in(Launches launches) {
  Machine& machine = Machine::here();
  machine.memory = memory;
  std::string found;
  for (int n = 0; n < 16 && found.empty(); ++n) {
    global = {};
    machine.watch(&global, sizeof(global), 4, "global memory");
    try {
      launches(machine);
    } catch (const std::runtime_error& error) {
      found = error.what();
    }
    machine.forget();
  }
  return found;
}
template <class Kernel>
std::string race(int blocks, int threads, Kernel kernel) {
  return found_in([&](Machine& machine) { machine.run(blocks, threads, 0, kernel); });
}

// Nothing is found in a kernel that is right, and a race that ends in these words in one that is not.
::testing::AssertionResult finds(const std::string& found, bool right, const std::string& end) {
  const bool race = found.starts_with("race at byte ") && found.find(" of global memory: ") != std::string::npos &&
                    found.ends_with(end);
  if (right ? found.empty() : race) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "found: \"" << found << "\"";
}
const std::string unordered = ", and nothing orders them", unfenced = ", without a proxy fence between them";

// --- two blocks: the first writes, the second reads

// Without ld.acquire.
void wait_relaxed(UInt32 value) {
  Machine& m = Machine::here();
  m.wait_until([&] { return Machine::peek(&global.count) == value; });
  EXPECT_EQ(m.look_at_count(&global.count), value);
}

TEST(RacesOfBlocks, WhoWritesTheSamePlace) {
  for (const bool apart : {true, false})
    EXPECT_TRUE(finds(race(2, 1, [&] { global.data[apart ? blockIdx.x : 0] = 1; }), apart, unordered));
}

TEST(RacesOfBlocks, ReleaseAndAcquire) {
  enum { right, fence_of_readers, no_fence_of_writers, no_fence_of_readers, counts_too_early, does_not_wait };
  for (const int fault :
       {right, fence_of_readers, no_fence_of_writers, no_fence_of_readers, counts_too_early, does_not_wait}) {
    const std::string found = race(2, 1, [&] {
      if (blockIdx.x == 0) {
        if (fault == counts_too_early) sm90::count_one_more(&global.count);
        global.data[0] = 1;
        if (fault == no_fence_of_writers) atomicAdd(&global.count, 1u);
        if (fault != no_fence_of_writers && fault != counts_too_early) sm90::count_one_more(&global.count);
        return;
      }
      if (fault == fence_of_readers || fault == no_fence_of_readers)
        wait_relaxed(1);
      else if (fault != does_not_wait)
        sm90::wait_for_count(&global.count, 1);
      if (fault == fence_of_readers) Machine::here().fence(false);
      sink = global.data[0];
    });
    EXPECT_TRUE(finds(found, fault == right || fault == fence_of_readers, unordered)) << fault;
  }
}

// What was counted tells only those who have read that count.
TEST(RacesOfBlocks, AValueThatWasNotRead) {
  for (const bool looks_at_it : {true, false}) {
    const std::string found = race(2, 1, [&] {
      if (blockIdx.x == 0) {
        global.data[0] = 1;
        sm90::count_one_more(&global.count);
        return;
      }
      const UInt32 seen = Machine::here().look_at_count(&global.count);
      Machine::here().fence(false);
      if (seen == 1 || !looks_at_it) sink = global.data[0];
    });
    EXPECT_TRUE(finds(found, looks_at_it, unordered));
  }
}

// What was read is overwritten only behind those who read it.
TEST(RacesOfBlocks, WhatIsOverwrittenTooEarly) {
  for (const bool ordered : {true, false}) {
    const std::string found = race(2, 1, [&] {
      if (blockIdx.x == 0) sink = global.data[0], sm90::count_one_more(&global.count);
      if (blockIdx.x == 0) return;
      if (ordered) sm90::wait_for_count(&global.count, 1);
      global.data[0] = 2;
    });
    EXPECT_TRUE(finds(found, ordered, unordered));
  }
}

// --- one thread counts for its block, and one waits for its block: barriers carry on what fences tell

TEST(RacesOfBlocks, BarriersCarryOn) {
  enum { right, no_barrier_of_writers, no_barrier_of_readers };
  for (const int fault : {right, no_barrier_of_writers, no_barrier_of_readers}) {
    const std::string found = race(2, 64, [&] {
      if (blockIdx.x == 0) {
        global.data[threadIdx.x] = 1;
        if (fault != no_barrier_of_writers) __syncthreads();
        if (threadIdx.x == 0) sm90::count_one_more(&global.count);
        return;
      }
      if (threadIdx.x == 0) sm90::wait_for_count(&global.count, 1);
      if (fault != no_barrier_of_readers) __syncthreads();
      sink = global.data[63 - threadIdx.x];
    });
    EXPECT_TRUE(finds(found, fault == right, unordered)) << fault;
  }
}

// Where the fence comes before the barrier, the one who counts tells only of itself; but fences.sc of all writers and
// all readers have an order, and the count says which.
TEST(RacesOfBlocks, FencesOfAllThreads) {
  enum { right, weaker_fences, no_fence_of_writers, no_fence_of_readers, reads_anyway };
  for (const int fault : {right, weaker_fences, no_fence_of_writers, no_fence_of_readers, reads_anyway}) {
    const std::string found = race(3, 64, [&] {
      const auto fence = [&] { Machine::here().fence(fault != weaker_fences); };
      auto& last = *reinterpret_cast<bool*>(memory);
      global.data[64 * blockIdx.x + threadIdx.x] = 1;
      if (fault != no_fence_of_writers) fence();
      __syncthreads();
      if (threadIdx.x == 0) last = atomicAdd(&global.count, 1u) == 2;
      __syncthreads();
      if (!last && fault != reads_anyway) return;
      if (fault != no_fence_of_readers) fence();
      for (int b = 0; b < 3; ++b) sink = global.data[64 * b + 63 - threadIdx.x];
    });
    EXPECT_TRUE(finds(found, fault == right, unordered)) << fault;
  }
}

// Who takes which work is chance, so that tickets order nothing, though this run's would.
TEST(RacesOfBlocks, TicketsOrderNothing) {
  for (const bool told : {false, true}) {
    const std::string found = found_in([&](Machine& machine) {
      if (told) machine.tickets(&global.taken);
      machine.run(2, 1, 0, [&] {
        global.data[blockIdx.x] = 1;
        __threadfence();
        const UInt32 ticket = atomicAdd(&global.taken, 1u);
        __threadfence();
        if (ticket == 1) sink = global.data[1 - blockIdx.x];
      });
    });
    EXPECT_TRUE(finds(found, !told, unordered));
  }
}

// Many blocks add, in any order; whoever reads the sum by an ordinary instruction comes after all of them.
TEST(RacesOfBlocks, SumsOfManyBlocks) {
  enum { right, reads_early, stores };
  for (const int fault : {right, reads_early, stores}) {
    const std::string found = found_in([&](Machine& machine) {
      machine.run(3, 32, 0, [&] {
        if (fault == stores && blockIdx.x == 0 && threadIdx.x == 0) global.data[0] = 1;
        if (fault == reads_early) sink = global.data[0];
        atomicAdd(&global.data[0], 1.0f);
      });
      machine.run(1, 1, 0, [&] { sink = global.data[0]; });
    });
    EXPECT_TRUE(finds(found, fault == right, unordered)) << fault;
  }
}

// Blocks that wait for others go on, whatever the order; if all of them wait, the machine says so.
TEST(RacesOfBlocks, WaitingForEachOther) {
  for (const bool comes : {true, false}) {
    const std::string found = race(3, 32, [&] {
      if (threadIdx.x > 0) return;
      if (blockIdx.x == 0) sm90::wait_for_count(&global.count, 2);
      if (comes || blockIdx.x == 1) sm90::count_one_more(&global.count);
    });
    EXPECT_EQ(found, comes ? "" : "all threads of the block wait");
  }
}

// --- launches

TEST(RacesOfLaunches, EachFollowsTheOneBefore) {
  enum { after, programmatic, waits, one_thread_waits, waits_too_late };
  for (const int how : {after, programmatic, waits, one_thread_waits, waits_too_late}) {
    for (const bool writes : {false, true}) {
      const auto access = [](bool write, int n) {
        if (write)
          global.data[n] = 1;
        else
          sink = global.data[n];
      };
      const std::string found = found_in([&](Machine& machine) {
        machine.run(2, 32, 0, [&] { access(!writes, 32 * blockIdx.x + threadIdx.x); });
        machine.run(
            2, 32, 0,
            [&] {
              if (how == waits || (how == one_thread_waits && threadIdx.x == 0)) sm90::wait_for_kernel_before();
              if (how == one_thread_waits) __syncthreads();
              access(writes, 63 - 32 * blockIdx.x - threadIdx.x);
              if (how == waits_too_late || how == programmatic) sm90::wait_for_kernel_before();
            },
            how != after);
      });
      EXPECT_TRUE(finds(found, how != programmatic && how != waits_too_late, unordered)) << how << writes;
    }
  }
}

// What the launch before the last one wrote is there, unless the last one has not waited for it yet.
TEST(RacesOfLaunches, TheOneBeforeTheLast) {
  for (const bool both : {false, true}) {
    const std::string found = found_in([&](Machine& machine) {
      machine.run(1, 1, 0, [&] { global.data[0] = 1; });
      machine.run(
          1, 1, 0, [&] { sm90::wait_for_kernel_before(); }, both);
      machine.run(
          1, 1, 0, [&] { sink = global.data[0], sm90::wait_for_kernel_before(); }, true);
    });
    EXPECT_TRUE(finds(found, !both, unordered));
  }
}

// Otherwise nobody could tell what the launch after it may read.
TEST(RacesOfLaunches, SomebodyWaits) {
  EXPECT_EQ(found_in([](Machine& machine) {
              machine.run(
                  1, 1, 0, [] {}, true);
            }),
            "a block of a programmatic launch ends without having waited for the launch before");
}

// --- asynchronous accesses

// A bulk store has written when it has been waited for, not when it has read.
TEST(RacesOfBulkStores, AreWaitedFor) {
  enum { right, waits_for_reading, no_wait };
  for (const bool adds : {false, true})
    for (const int fault : {right, waits_for_reading, no_wait}) {
      const std::string found = race(2, 32, [&] {
        if (threadIdx.x > 0) return;
        if (blockIdx.x == 0) {
          for (int n = 0; n < 32; ++n) shared_numbers()[n] = 1;
          sm90::publish_shared();
          if (adds)
            sm90::add_floats<128>(global.data, 0);
          else
            sm90::store_bytes<128>(global.data, 0);
          if (fault == right) sm90::wait_stores();
          if (fault == waits_for_reading) sm90::wait_stores_read();
          sm90::count_one_more(&global.count);
          return;
        }
        sm90::wait_for_count(&global.count, 1);
        sink = global.data[31];
      });
      EXPECT_TRUE(finds(found, fault == right, unordered)) << fault;
    }
}

// The next block's bulk additions, behind the first one's bulk stores or its ordinary ones: in turn, and behind a fence
// between proxies in their own block. Additions alone need none.
TEST(RacesOfBulkStores, InTurn) {
  enum { right, ordinary_stores, only_additions, no_fence, fence_of_the_first, no_turn };
  for (const int how : {right, ordinary_stores, only_additions, no_fence, fence_of_the_first, no_turn}) {
    const std::string found = race(2, 32, [&] {
      if (threadIdx.x > 0) return;
      for (int n = 0; n < 32; ++n) shared_numbers()[n] = 1;
      sm90::publish_shared();
      if (blockIdx.x == 0) {
        if (how == ordinary_stores)
          for (int n = 0; n < 32; ++n) global.data[n] = 1;
        else if (how == only_additions)
          sm90::add_floats<128>(global.data, 0);
        else
          sm90::store_bytes<128>(global.data, 0);
        sm90::wait_stores();
        if (how == fence_of_the_first) sm90::publish_global();
        sm90::count_one_more(&global.count);
        return;
      }
      if (how != no_turn && how != only_additions) sm90::wait_for_count(&global.count, 1);
      if (how == right || how == ordinary_stores) sm90::publish_global();
      sm90::add_floats<128>(global.data, 0);
      sm90::wait_stores();
    });
    const bool is_right = how == right || how == ordinary_stores || how == only_additions;
    EXPECT_TRUE(finds(found, is_right, how == no_turn ? unordered : unfenced)) << how;
  }
}

// What another block wrote, and a copy to shared memory reads: a bulk copy behind a fence between proxies, too.
TEST(RacesOfCopies, ReadWhatAnotherBlockWrote) {
  enum { right, no_wait, no_fence };
  for (const bool bulk : {false, true})
    for (const int fault : {right, no_wait, no_fence}) {
      const std::string found = race(2, 32, [&] {
        if (threadIdx.x > 0) return;
        if (blockIdx.x == 0) {
          global.data[3] = 1;
          sm90::count_one_more(&global.count);
          return;
        }
        if (fault != no_wait) sm90::wait_for_count(&global.count, 1);
        if (bulk) {
          if (fault != no_fence) sm90::publish_global();
          barrier().init(1);
          barrier().expect(16);
          sm90::load_bytes<16>(0, global.data, barrier());
          barrier().wait(0);
        } else {
          gpu::copy_async<16>(0, global.data, 16);
          gpu::commit_copies();
          gpu::wait_copies<0>();
        }
      });
      EXPECT_TRUE(finds(found, fault == right || (fault == no_fence && !bulk), fault == no_wait ? unordered : unfenced))
          << bulk << fault;
    }
}

}  // namespace
}  // namespace tessera::emulated
