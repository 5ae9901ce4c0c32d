// SPDX-License-Identifier: Apache-2.0
// The kernel that only reads on the emulated machine: every chunk of both ranges is loaded once, and nothing beside
// them. Links tessera_cases. Implements docs/benchmarks.md, "Method".
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "core/failure.hpp"
#include "cuda/read.hpp"
#include "tests/emulated/machine.hpp"
#include "tests/support/support.hpp"

// Device code, behind what stands in for CUDA.
#include "cuda/kernel/read.cuh"

namespace tessera::test {
namespace {

constexpr UInt32 mark = 0x5ca1ab1e;

// Two ranges between margins. A thread that loaded the mark, and zeros, counts itself.
struct Ranges {
  std::vector<uint4> first, second;
  UInt32 found = 0;

  Ranges(std::size_t a, std::size_t b) : first(a + 2), second(b + 2) {
    for (std::vector<uint4>* x : {&first, &second}) x->front() = x->back() = {mark, 0, 0, 0};
  }
  static cuda::ReadRange inside(const std::vector<uint4>& x) {
    return {x.data() + 1, static_cast<std::int64_t>((x.size() - 2) * sizeof(uint4))};
  }
  UInt32 read(int blocks) {
    cuda::ReadParams params = cuda::read_params(inside(first), inside(second), &found);
    params.wanted = mark, found = 0;
    emulated::Machine::here().run(blocks, cuda::read_threads, 0, [&] { cuda::read(params); });
    ++case_count.judged;
    return found;
  }
};

TEST(ReadMachine, EveryChunkIsLoadedOnce) {
  constexpr int blocks = 2;
  constexpr std::size_t round = blocks * cuda::read_threads;
  Ranges x(3 * round + 5, 7 * round - 2);  // more than a round of loads at once, and an uneven end
  EXPECT_EQ(x.read(blocks), 0u);           // margins are not loaded
  for (std::vector<uint4>* range : {&x.first, &x.second})
    for (const std::size_t n : {std::size_t{1}, round, round + 1, range->size() / 2, range->size() - 2}) {
      UInt32* const words[] = {&(*range)[n].x, &(*range)[n].y, &(*range)[n].z, &(*range)[n].w};
      UInt32& word = *words[n % 4];
      word = mark;
      EXPECT_EQ(x.read(blocks), 1u) << n;
      word = 0;
    }
}

TEST(ReadMachine, ARangeMayBeEmpty) {
  Ranges x(3, 0);
  x.first[3].w = mark;
  EXPECT_EQ(x.read(1), 1u);
}

TEST(ReadParams, AreMultiplesOfAChunk) {
  alignas(16) static unsigned char bytes[64];
  UInt32 found = 0;
  const auto refusal = [&](cuda::ReadRange range) {
    try {
      cuda::read_params({bytes, 32}, range, &found);
    } catch (const Failure& failure) {
      return std::string(failure.what());
    }
    return std::string();
  };
  EXPECT_EQ(refusal({bytes, 64}), "");
  EXPECT_NE(refusal({bytes, 8}).find("has 8 bytes; both must be multiples of 16"), std::string::npos);
  EXPECT_NE(refusal({bytes, -16}).find("has -16 bytes"), std::string::npos);
  EXPECT_NE(refusal({bytes + 4, 16}).find("has 16 bytes; both must be multiples of 16"), std::string::npos);
}

}  // namespace
}  // namespace tessera::test
