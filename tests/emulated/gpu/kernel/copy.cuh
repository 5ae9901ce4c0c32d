// SPDX-License-Identifier: Apache-2.0
// Stands in for src/gpu/kernel/copy.cuh on the host: an asynchronous copy arrives as late as its wait allows. From the
// moment it is issued until then its place holds NaN, so whoever reads too early, or still, is seen.
#pragma once

#include "tests/emulated/machine.hpp"

namespace tessera::gpu {

using emulated::Machine;

inline UInt32 shared_address(const void* p) {
  return UInt32(static_cast<const unsigned char*>(p) - Machine::here().memory);
}

template <int size>
void copy_async(UInt32 to, const void* from, int bytes) {
  if (to % size != 0) throw std::runtime_error("a copy's place in shared memory is not aligned");
  if (bytes > 0 && reinterpret_cast<UInt64>(from) % size != 0) throw std::runtime_error("a copy's source is unaligned");
  if (bytes < 0 || bytes > size) throw std::runtime_error("a copy of more bytes than it has, or fewer than none");
  Machine::here().copy_late({to, from, size, bytes});
}
inline void commit_copies() { Machine::here().commit_copies(); }
template <int pending>
void wait_copies() {
  Machine::here().wait_copies(pending);
}

inline void store_chunk(UInt32 to, uint4 x) {
  if (to % 16 != 0) throw std::runtime_error("16 bytes are stored at an address that is no multiple of 16");
  Machine::here().store(to, &x, 16);
}

inline void store_four(UInt32 to, const float* x) {
  if (to % 16 != 0) throw std::runtime_error("16 bytes are stored at an address that is no multiple of 16");
  Machine::here().store(to, x, 16);
}
inline void load_four(UInt32 from, float (&x)[4]) {
  if (from % 16 != 0) throw std::runtime_error("16 bytes are loaded from an address that is no multiple of 16");
  Machine::here().load(x, from, 16);
}
inline void load_two(UInt32 from, float (&x)[2]) {
  if (from % 8 != 0) throw std::runtime_error("8 bytes are loaded from an address that is no multiple of 8");
  Machine::here().load(x, from, 8);
}
inline void store_pair(UInt32 to, UInt32 x) { Machine::here().store(to, &x, 4); }

inline void store_number(UInt32 to, float x) { Machine::here().store(to, &x, 4); }
inline float load_number(UInt32 from) {
  float x;
  Machine::here().load(&x, from, 4);
  return x;
}

}  // namespace tessera::gpu
