// SPDX-License-Identifier: Apache-2.0
// Stands in for src/sm90/ptx/wgmma.cuh on the host: products happen at once, or when they are waited for. Operands are
// fetched from the addresses that their descriptors mean, and from the registers of the lanes that hold them.
#pragma once

#include <array>

#include "sm90/layout.hpp"
#include "sm90/ptx/barrier.cuh"
#include "sm90/ptx/math.cuh"

namespace tessera::sm90 {

TESSERA_UNWATCHED inline UInt32 field(Operand o, int shift) { return UInt32(o.bits >> shift & 0x3fff) * 16; }
TESSERA_UNWATCHED inline const unsigned char* swizzled(UInt32 byte) {
  return Machine::here().memory + (byte ^ (byte >> 7 & 7) << 4);
}

template <Element element>
TESSERA_UNWATCHED float number_at(const unsigned char* at) {
  UInt16 bits;
  Machine::here().accesses(at, 2, emulated::Access::read);
  std::memcpy(&bits, at, 2);
  return unpacked<element>(bits);
}

// The 16 numbers of a row, which lie side by side: two pieces of 16 bytes.
template <Element element>
TESSERA_UNWATCHED void fetch_row(float (&x)[16], Operand o, int row) {
  const UInt32 first = field(o, 0) + UInt32(row / 8) * field(o, 32) + UInt32(row % 8 * 128);
  for (int piece = 0; piece < 2; ++piece) {
    const unsigned char* at = swizzled(first + UInt32(16 * piece));
    for (int k = 0; k < 8; ++k) x[8 * piece + k] = number_at<element>(at + 2 * k);
  }
}

// The 16 numbers of a column, each in a row of its own.
template <Element element>
TESSERA_UNWATCHED void fetch_column(float (&x)[16], Operand o, int column) {
  const UInt32 first = field(o, 0) + UInt32(column / 64) * field(o, 16) + UInt32(column % 64 * 2);
  for (int k = 0; k < 16; ++k)
    x[k] = number_at<element>(swizzled(first + UInt32(k / 8) * field(o, 32) + UInt32(k % 8 * 128)));
}

template <int n, Element element>
struct Wgmma {
  using Sums = float[n / 2];

  static void set(Sums& d, Operand a, Operand b) {
    Machine::here().multiply([&d, a, b] { clear(d), add_now(d, a, b); });
  }
  static void set_in_place(Sums& d, Operand a, Operand b) { set(d, a, b); }
  static void add(Sums& d, Operand a, Operand b) {
    Machine::here().multiply([&d, a, b] { add_now(d, a, b); });
  }
  static void set_over_rows(Sums& d, Operand a, Operand b) {
    Machine::here().multiply([&d, a, b] { clear(d), add_over_rows_now(d, a, b); });
  }
  static void add_over_rows(Sums& d, Operand a, Operand b) {
    Machine::here().multiply([&d, a, b] { add_over_rows_now(d, a, b); });
  }
  // The compiler sees to it that the registers keep their values.
  static void add(Sums& d, const UInt32* a, Operand b, bool accumulate) {
    Machine::here().multiply([&d, a = std::array{a[0], a[1], a[2], a[3]}, b, accumulate] {
      if (!accumulate) clear(d);
      add_over_rows_now(d, a, b);
    });
  }

 private:
  static void clear(Sums& d) {
    for (float& x : d) x = 0;
  }
  static void add_now(Sums& d, Operand a, Operand b) {
    float rows[2][16];
    fetch(rows, a);
    multiply(d, rows, [b](float(&x)[16], int column) { fetch_row<element>(x, b, column); });
  }
  static void add_over_rows_now(Sums& d, Operand a, Operand b) {
    float rows[2][16];
    fetch(rows, a);
    multiply(d, rows, [b](float(&x)[16], int column) { fetch_column<element>(x, b, column); });
  }
  static void add_over_rows_now(Sums& d, const std::array<UInt32, 4>& a, Operand b) {
    const int lane = threadIdx.x % 32;
    float rows[2][16];  // this lane's own columns, and those of the three lanes beside it
    for (int r = 0; r < 4; ++r) {
      const auto& all = Machine::here().meet(Machine::here().warp_name(), 32, lane, a[std::size_t(r)]);
      for (int other = 0; other < 4; ++other)
        for (int half = 0; half < 2; ++half) {
          const auto bits = UInt32(all[std::size_t(lane / 4 * 4 + other)] >> 16 * half & 0xffff);
          rows[r % 2][8 * (r / 2) + 2 * other + half] = unpacked<element>(bits);
        }
    }
    multiply(d, rows, [b](float(&x)[16], int column) { fetch_column<element>(x, b, column); });
  }

  static void fetch(float (&rows)[2][16], Operand a) {
    for (int r = 0; r < 2; ++r) fetch_row<element>(rows[r], a, accumulator_row(threadIdx.x % 128, 2 * r));
  }
  // A thread's two rows of the first operand with all of its columns of the second.
  template <class Fetch>
  TESSERA_UNWATCHED static void multiply(Sums& d, const float (&rows)[2][16], Fetch fetch) {
    for (int i = 0; i < n / 2; i += i % 2 == 0 ? 1 : 3) {
      float x[16];
      fetch(x, accumulator_column(threadIdx.x % 128, i));
      for (int k = 0; k < 16; ++k) d[i] += rows[0][k] * x[k], d[i + 2] += rows[1][k] * x[k];
    }
  }
};

inline void begin_products() {}
inline void commit_products() { Machine::here().commit_products(); }
template <int pending>
void wait_products() {
  Machine::here().wait_products(pending);
}
template <int count>
void arrived(float (&)[count]) {}
template <int count>
void settled(UInt32 (&)[count]) {}

inline void store_matrix(UInt32 address, UInt32 a, UInt32 b, UInt32 c, UInt32 d) {
  Machine& m = Machine::here();
  const int lane = threadIdx.x % 32;
  const UInt32 registers[] = {a, b, c, d};
  const std::vector<UInt64> addresses = m.meet(m.warp_name(), 32, lane, address);
  for (int r = 0; r < 4; ++r)
    m.store(addresses[std::size_t(8 * r + lane / 4)] + UInt64(4 * (lane % 4)), &registers[r], 4);
}

inline void store_matrix_turned(UInt32 address, UInt32 a, UInt32 b, UInt32 c, UInt32 d) {
  Machine& m = Machine::here();
  const int lane = threadIdx.x % 32;
  const UInt32 registers[] = {a, b, c, d};
  const std::vector<UInt64> addresses = m.meet(m.warp_name(), 32, lane, address);
  for (int r = 0; r < 4; ++r)
    for (int half = 0; half < 2; ++half) {
      const auto bits = UInt16(registers[r] >> 16 * half);
      m.store(addresses[std::size_t(8 * r + lane % 4 * 2 + half)] + UInt64(2 * (lane / 4)), &bits, 2);
    }
}

}  // namespace tessera::sm90
