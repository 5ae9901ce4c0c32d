// SPDX-License-Identifier: Apache-2.0
// Device code on the host: the kernels' own functions, called thread by thread, so that pictures show what the kernels
// do and not what somebody remembers of them. Every 16-byte access is recorded, and lanes can exchange numbers.
// Included by the pictures of the GPU kernels, before anything else of src/ladder/kernel.
#pragma once

#include <barrier>
#include <bit>
#include <cmath>
#include <thread>
#include <vector>

namespace tessera::pictures {

struct Access {
  const void* address;
  bool store;
};
inline thread_local std::vector<Access>* accesses = nullptr;  // of the thread that runs now; null: not recorded

// Lanes at the same instruction, each a thread of the host.
struct Lanes {
  explicit Lanes(int count) : numbers(static_cast<std::size_t>(count)), meet(count) {}
  std::vector<float> numbers;
  std::vector<std::vector<float>> offered;  // what the lanes held at each exchange so far
  std::barrier<> meet;
};
inline thread_local Lanes* lanes = nullptr;

// Of the accesses of one thread, those inside an object.
template <class Object>
std::vector<Access> inside(const std::vector<Access>& all, const Object& object) {
  std::vector<Access> found;
  const auto* begin = reinterpret_cast<const char*>(&object);
  for (const Access& access : all) {
    const auto* at = static_cast<const char*>(access.address);
    if (at >= begin && at < begin + sizeof(Object)) found.push_back(access);
  }
  return found;
}

}  // namespace tessera::pictures

// --- what CUDA C++ has and C++ has not

#define __device__
#define __align__(bytes)

struct ThreadPlace {
  unsigned x = 0;
};
inline thread_local ThreadPlace threadIdx, blockIdx, gridDim;

// A copy of one is a 16-byte load, an assignment a load and a store.
struct float4 {
  float x, y, z, w;
  float4() = default;
  float4(float x, float y, float z, float w) : x(x), y(y), z(z), w(w) {}
  float4(const float4& from) : x(from.x), y(from.y), z(from.z), w(from.w) { note(&from, false); }
  float4& operator=(const float4& from) {
    x = from.x, y = from.y, z = from.z, w = from.w;
    note(&from, false), note(this, true);
    return *this;
  }
  static void note(const void* address, bool store) {
    if (tessera::pictures::accesses) tessera::pictures::accesses->push_back({address, store});
  }
};

inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline void __syncwarp() {}
template <class Number>
inline Number __shfl_xor_sync(unsigned, Number x, int distance) {
  tessera::pictures::Lanes& all = *tessera::pictures::lanes;
  all.numbers[threadIdx.x] = float(x);
  all.meet.arrive_and_wait();
  if (threadIdx.x == 0) all.offered.push_back(all.numbers);
  const Number other = Number(all.numbers[threadIdx.x ^ unsigned(distance)]);
  all.meet.arrive_and_wait();
  return other;
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wsign-compare"
#include "gpu/kernel/scores.cuh"
#include "ladder/kernel/product.cuh"
#include "ladder/kernel/rows.cuh"
#pragma GCC diagnostic pop
