// SPDX-License-Identifier: Apache-2.0
// ldmatrix and mma.sync for 16-bit operands and f32 sums. Thin: one function, one instruction of the PTX ISA, whose
// section each comment names; gpu/layout.hpp says what lies where. Device code.
#pragma once

#include "gpu/config.hpp"

namespace tessera::gpu {

// "ldmatrix": four matrices of 8 by 8, whose rows the lanes name. `turned`: each is transposed on its way.
template <bool turned>
__device__ inline void load_matrices(UInt32 (&x)[4], UInt32 address) {
  if constexpr (turned)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

// "mma.m16n8k16", "mma.m16n8k8": c += a b, 16 rows by 8 columns over 16 terms; c is four of a thread's values. turing:
// as two products of 8 terms.
template <Element element, bool turing>
__device__ inline void multiply(float* c, const UInt32 (&a)[4], UInt32 b0, UInt32 b1) {
  if constexpr (turing) {
    static_assert(element == Element::f16);
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[2]), "r"(a[3]), "r"(b1));
  } else if constexpr (element == Element::f16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// x itself, which is not negative: what is computed from it is computed where it is needed, and not kept in registers
// from before a loop. "vote.sync": whether some lane's is, which the compiler cannot know. All lanes of the warp take
// part.
__device__ inline int recomputed(int x) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b32 t;\nsetp.lt.s32 p, %0, 0;\nvote.sync.ballot.b32 t, p, 0xffffffff;\n"
      "add.s32 %0, %0, t;\n}"
      : "+r"(x));
  return x;
}

// address ^ bits. Volatile: the compiler would compute such addresses once and keep them all, which spills.
__device__ inline UInt32 turned(UInt32 address, int bits) {
  if (bits == 0) return address;
  UInt32 y;
  asm volatile("xor.b32 %0, %1, %2;" : "=r"(y) : "r"(address), "r"(bits));
  return y;
}

}  // namespace tessera::gpu
