// SPDX-License-Identifier: Apache-2.0
// Stands in for src/gpu/kernel/matrix.cuh on the host: fragments as the PTX ISA describes them for ldmatrix,
// mma.m16n8k16 and mma.m16n8k8. A load whose rows share banks of shared memory is an error: the kernels' layout is to
// have none.
#pragma once

#include "gpu/kernel/math.cuh"
#include "tests/emulated/machine.hpp"

namespace tessera::gpu {

using emulated::Machine;

// Lane l names row l % 8 of matrix l / 8, and gets of each matrix numbers 2 (l % 4) and 2 (l % 4) + 1 of row l / 4; of
// column l / 4 if turned. Eight rows are loaded at a time, one of each 16 bytes of the 32 banks.
template <bool turned>
void load_matrices(UInt32 (&x)[4], UInt32 address) {
  Machine& m = Machine::here();
  const int lane = threadIdx.x % 32;
  const std::vector<UInt64>& addresses = m.meet(m.warp_name(), 32, lane, address);
  for (int matrix = 0; matrix < 4; ++matrix) {
    const UInt64* rows = &addresses[std::size_t(8 * matrix)];
    unsigned banks = 0;
    for (int row = 0; row < 8; ++row) {
      if (rows[row] % 16 != 0) throw std::runtime_error("a row of ldmatrix is not aligned");
      banks |= 1u << rows[row] / 16 % 8;
    }
    if (banks != 0xff) throw std::runtime_error("bank conflict of ldmatrix");
    UInt16 pair[2];
    for (int e = 0; e < 2; ++e) {
      const int row = turned ? lane % 4 * 2 + e : lane / 4, column = turned ? lane / 4 : lane % 4 * 2 + e;
      m.load(&pair[e], rows[row] + UInt64(2 * column), 2);
    }
    x[matrix] = pair[0] | UInt32(pair[1]) << 16;
  }
}

// What a lane brings to a product, widened: registers of a, then of b, two numbers each.
struct Brought {
  float numbers[12];
};

// c += a b over `steps` times 8 terms. With g = lane / 4 and t = lane % 4, a lane holds of each 8 terms k:
//   a: rows g and g + 8 at k = 2 t, 2 t + 1    b: column g at k = 2 t, 2 t + 1
//   c: columns 2 t, 2 t + 1 of row g, then of row g + 8
#pragma GCC push_options
#pragma GCC optimize("O3")  // the longest part of many tests, which are compiled with -O1
TESSERA_UNWATCHED inline void multiply_brought(float* c, const Brought& own) {
  Machine& m = Machine::here();
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const Brought* all = m.exchange(own);
  for (int e = 0; e < 4; ++e) {
    const int row = e / 2, column = 2 * t + e % 2;
    float sum = c[e];
    for (int k = 0; k < 16; ++k) {
      const int half = k / 8, from = k % 8 / 2, number = k % 2;
      sum += all[4 * g + from].numbers[2 * (2 * half + row) + number] *
             all[4 * column + from].numbers[8 + 2 * half + number];
    }
    c[e] = sum;
  }
}
#pragma GCC pop_options

template <Element element, bool turing>
void multiply(float* c, const UInt32 (&a)[4], UInt32 b0, UInt32 b1) {
  static_assert(!turing || element == Element::f16, "sm_75 multiplies f16 only");
  const UInt32 registers[] = {a[0], a[1], a[2], a[3], b0, b1};
  Brought own;
  for (int n = 0; n < 12; ++n) own.numbers[n] = unpacked<element>(registers[n / 2] >> n % 2 * 16 & 0xffff);
  multiply_brought(c, own);
}

inline int recomputed(int x) {
  if (__any_sync(0xffffffffu, x < 0)) throw std::runtime_error("a number below 0 cannot be recomputed");
  return x;
}
inline UInt32 turned(UInt32 address, int bits) { return address ^ UInt32(bits); }

}  // namespace tessera::gpu
