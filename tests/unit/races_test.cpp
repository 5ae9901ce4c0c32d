// SPDX-License-Identifier: Apache-2.0
// The search for races notices what is not ordered, and nothing else: small kernels on the emulated machine, each with
// and without what orders it; and the machine, where a block's shared memory ends. Implements docs/testing.md, "Races".
#include <gtest/gtest.h>

#include <string>

#include "tests/emulated/machine.hpp"
// The machine comes first: device code needs it.
#include "gpu/kernel/copy.cuh"
#include "sm90/ptx/barrier.cuh"
#include "sm90/ptx/tma.cuh"
#include "sm90/ptx/wgmma.cuh"

namespace tessera::emulated {
namespace {

alignas(1024) unsigned char memory[Machine::memory_bytes];
alignas(16) const float far[64] = {1, 2, 3};  // in global memory

float* numbers() { return reinterpret_cast<float*>(memory); }
sm90::Barrier& barrier(int n) { return reinterpret_cast<sm90::Barrier*>(memory + 4096)[n]; }

// What is found, in many orders of the threads; "" if nothing.
template <class Kernel>
std::string race(int threads, Kernel kernel) {
  Machine& machine = Machine::here();
  machine.memory = memory;
  try {
    for (int n = 0; n < 8; ++n) machine.run(1, threads, 0, kernel);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

// Nothing is found in a kernel that is right, and a race that ends in these words in one that is not.
::testing::AssertionResult finds(const std::string& found, bool right, const std::string& end) {
  const bool race = found.starts_with("race at byte ") && found.ends_with(end);
  if (right ? found.empty() : race) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "found: \"" << found << "\"";
}
const std::string unordered = ", and nothing orders them", unfenced = ", without a proxy fence between them";

volatile float sink;

TEST(Races, BarriersOfABlock) {
  for (const bool ordered : {true, false}) {
    const std::string found = race(64, [&] {
      numbers()[threadIdx.x] = 1;
      if (ordered) __syncthreads();
      sink = numbers()[(threadIdx.x + 33) % 64];
    });
    EXPECT_TRUE(finds(found, ordered, unordered));
  }
}

// A read before the write is as bad as one after it.
TEST(Races, WhatIsOverwrittenTooEarly) {
  for (const bool ordered : {true, false}) {
    const std::string found = race(64, [&] {
      numbers()[threadIdx.x] = 1;
      __syncthreads();
      sink = numbers()[63 - threadIdx.x];
      if (ordered) __syncthreads();
      numbers()[threadIdx.x] = 2;
    });
    EXPECT_TRUE(finds(found, ordered, unordered));
  }
}

// Lanes that exchange registers have not ordered their memory.
TEST(Races, AShuffleIsNoBarrier) {
  for (const bool ordered : {true, false}) {
    const std::string found = race(32, [&] {
      numbers()[threadIdx.x] = 1;
      sink = __shfl_xor_sync(~0u, 1.0f, 1);
      if (ordered) __syncwarp();
      sink = numbers()[threadIdx.x ^ 1];
    });
    EXPECT_TRUE(finds(found, ordered, unordered));
  }
}

TEST(Races, OneLaneArrivesForItsWarp) {
  for (const bool ordered : {true, false}) {
    const std::string found = race(64, [&] {
      if (threadIdx.x == 0) barrier(0).init(1);
      __syncthreads();
      if (threadIdx.x < 32) {
        numbers()[threadIdx.x] = 1;
        if (ordered) __syncwarp();
        if (threadIdx.x == 0) barrier(0).arrive();
      } else {
        barrier(0).wait(0);
        sink = numbers()[threadIdx.x - 32];
      }
    });
    EXPECT_TRUE(finds(found, ordered, unordered));
  }
}

// An asynchronous copy has come for the thread that waits for it, and for others behind a barrier.
TEST(Races, CopiesOfAThread) {
  enum { right, no_wait, no_barrier, overwritten };
  for (const int fault : {right, no_wait, no_barrier, overwritten}) {
    const std::string found = race(32, [&] {
      const auto place = UInt32(16 * threadIdx.x);
      if (fault == overwritten) sink = numbers()[4 * (threadIdx.x ^ 1)];
      gpu::copy_async<16>(place, far, 16);
      gpu::commit_copies();
      if (fault != no_wait) gpu::wait_copies<0>();
      if (fault != no_barrier) __syncwarp();
      sink = numbers()[4 * (threadIdx.x ^ 1)];
    });
    EXPECT_TRUE(finds(found, fault == right, unordered)) << fault;
  }
}

// A group may have a copy twice: whichever comes last, the bytes are the same.
TEST(Races, TheSameCopiedTwice) {
  enum { right, other_bytes, other_group, no_wait };
  for (const int fault : {right, other_bytes, other_group, no_wait}) {
    const std::string found = race(32, [&] {
      const auto place = UInt32(16 * threadIdx.x);
      gpu::copy_async<16>(place, far, 16);
      if (fault == other_group) gpu::commit_copies();
      gpu::copy_async<16>(place, fault == other_bytes ? far + 4 : far, 16);
      gpu::commit_copies();
      if (fault != no_wait) gpu::wait_copies<0>();
      __syncwarp();
      sink = numbers()[4 * (threadIdx.x ^ 1)];
    });
    EXPECT_TRUE(finds(found, fault == right, unordered)) << fault;
  }
}

// A stage that is filled by bulk copies, read by a warp and given back by one lane.
TEST(Races, BulkCopiesThroughAStage) {
  enum { right, reads_early, gives_back_early, no_sync_of_the_warp };
  for (const int fault : {right, reads_early, gives_back_early, no_sync_of_the_warp}) {
    const std::string found = race(64, [&] {
      sm90::Barrier &full = barrier(0), &empty = barrier(1);
      if (threadIdx.x == 0) full.init(1), empty.init(1);
      __syncthreads();
      if (threadIdx.x == 32)
        for (UInt32 round = 0; round < 4; ++round) {
          empty.wait(round % 2 ^ 1);
          full.expect(128);
          sm90::load_bytes<128>(0, far, full);
        }
      if (threadIdx.x >= 32) return;
      for (UInt32 round = 0; round < 4; ++round) {
        if (fault != reads_early) full.wait(round % 2);
        if (fault == gives_back_early && threadIdx.x == 0) empty.arrive();
        sink = numbers()[threadIdx.x];
        if (fault == reads_early) full.wait(round % 2);
        if (fault != no_sync_of_the_warp) __syncwarp();
        if (fault != gives_back_early && threadIdx.x == 0) empty.arrive();
      }
    });
    EXPECT_TRUE(finds(found, fault == right, unordered)) << fault;
  }
}

// What threads wrote, a product reads behind a fence, by the writer or by the reader, and a barrier; and what it reads
// stays until it has been waited for.
TEST(Races, Products) {
  enum { right, fence_of_readers, no_fence, no_barrier, overwritten, not_used };
  for (const int fault : {right, fence_of_readers, no_fence, no_barrier, overwritten, not_used}) {
    const std::string found = race(128, [&] {
      Machine& m = Machine::here();
      float number = 1, read[8] = {};
      for (int round = 0; round < 3; ++round) {
        m.store(UInt64(4 * threadIdx.x), &(number += 1), 4);
        if (fault == right || fault == no_barrier || fault == overwritten) sm90::publish_shared();
        if (fault != no_barrier) sm90::sync_threads(1, 128);
        if (fault == fence_of_readers) sm90::publish_shared();
        sm90::judge_races(fault != not_used);
        sm90::begin_products();
        m.multiply([&m, &read, at = UInt64(4 * (threadIdx.x ^ 64))] { m.load(read, at, 4); });
        sm90::commit_products();
        sm90::judge_races(true);
        if (fault != overwritten) sm90::wait_products<0>();
        sm90::sync_threads(1, 128);
      }
      sm90::wait_products<0>();
    });
    const bool harmless = fault == right || fault == fence_of_readers || fault == not_used;
    EXPECT_TRUE(finds(found, harmless, fault == no_fence ? unfenced : unordered)) << fault;
  }
}

TEST(Races, BulkStores) {
  static float out[32];
  enum { right, no_fence, overwritten };
  for (const int fault : {right, no_fence, overwritten}) {
    const std::string found = race(32, [&] {
      for (int round = 0; round < 2; ++round) {
        numbers()[threadIdx.x] = float(round);
        if (fault != no_fence) sm90::publish_shared();
        __syncwarp();
        if (threadIdx.x == 0) {
          sm90::store_bytes<128>(out, 0);
          if (fault != overwritten) sm90::wait_stores_read();
        }
        __syncwarp();
      }
    });
    EXPECT_TRUE(finds(found, fault == right, fault == no_fence ? unfenced : unordered)) << fault;
  }
}

// Atomic additions need no order among each other, but those who read the sum wait for all of them.
TEST(Races, AtomicAdditions) {
  for (const bool ordered : {true, false}) {
    const std::string found = race(64, [&] {
      auto* sum = reinterpret_cast<unsigned*>(memory);
      if (threadIdx.x == 0) *sum = 0;
      __syncthreads();
      atomicAdd(sum, 1u);
      if (ordered) __syncthreads();
      sink = float(*sum);
    });
    EXPECT_TRUE(finds(found, ordered, unordered));
  }
}

// Several may clear the same: whoever reads has waited for one of them.
TEST(Races, TheSameWrittenTwice) {
  for (const bool same : {true, false}) {
    const std::string found = race(64, [&] {
      if (threadIdx.x == 0) numbers()[0] = 5;
      __syncthreads();
      const auto number = float(same ? 0 : threadIdx.x / 32 + 1);
      if (threadIdx.x % 32 == 0) Machine::here().store(0, &number, 4);
      __syncwarp();
      float read;
      Machine::here().load(&read, 0, 4);
    });
    EXPECT_TRUE(finds(found, same, unordered));
  }
}

// What a launch asks for is all that its blocks have.
TEST(SharedMemory, EndsWhereItsLaunchSays) {
  enum { right, a_store, a_load, a_copy, ordinary, all_is_asked_for };
  for (const int how : {right, a_store, a_load, a_copy, ordinary, all_is_asked_for}) {
    Machine& machine = Machine::here();
    machine.memory = memory;
    if (how != all_is_asked_for) machine.shared_bytes = 1024;
    std::string found;
    try {
      machine.run(1, 32, 0, [&] {
        gpu::store_number(1020, 1);
        if (threadIdx.x > 0 || how == right) return;
        if (how == a_load) sink = gpu::load_number(1024);
        if (how == a_copy) gpu::copy_async<16>(1024, far, 16);
        if (how == ordinary) memory[2000] = 0;
        if (how == a_store || how == all_is_asked_for) gpu::store_number(1024, 1);
      });
    } catch (const std::runtime_error& error) {
      found = error.what();
    }
    const bool silent = how == right || how == all_is_asked_for;
    const std::string what = how == ordinary ? "a write" : "an access";
    EXPECT_EQ(found, silent ? "" : what + " behind the shared memory that was asked for") << how;
  }
}

}  // namespace
}  // namespace tessera::emulated
