// SPDX-License-Identifier: Apache-2.0
// CUDA's functions that device code calls, on the emulated machine: barriers, exchanges within a warp, fences,
// atomic operations. Included by tests/emulated/machine.hpp. docs/testing.md, "Races", says what orders memory.
#pragma once

#include "tests/emulated/machine.hpp"

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

// Atomic operations on integers may tell other blocks of what was written before; nobody looks at a float for that.
template <class Number, class Change>
inline Number changed_at_once(Number* at, const Change& change) {
  Number before{};
  tessera::emulated::Machine::here().change(at, sizeof(Number), !std::is_floating_point_v<Number>,
                                            [&] { before = *at, *at = change(before); });
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
// "membar.gl", which is fence.sc.gpu.
inline void __threadfence() { tessera::emulated::Machine::here().fence(true); }
template <class Thing>
inline Thing __ldcg(const Thing* at) {
  return *at;
}

inline unsigned __ballot_sync(unsigned, bool x) {
  auto& m = tessera::emulated::Machine::here();
  unsigned votes = 0, lane = 0;
  for (const tessera::UInt64 one : m.meet(m.warp_name(), 32, threadIdx.x % 32, x)) votes |= unsigned(one) << lane++;
  return votes;
}
inline bool __any_sync(unsigned, bool x) {
  auto& m = tessera::emulated::Machine::here();
  for (const tessera::UInt64 one : m.meet(m.warp_name(), 32, threadIdx.x % 32, x))
    if (one) return true;
  return false;
}
