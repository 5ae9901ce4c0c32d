// SPDX-License-Identifier: Apache-2.0
// Products on the tensor cores by a warpgroup of 128 threads (wgmma). They are asynchronous: issued between
// begin_products and commit_products, awaited by wait_products. Device code.
#pragma once

#include "sm90/config.hpp"
#include "sm90/layout.hpp"

namespace tessera::sm90 {

// One instruction: 64 rows by n columns by 16. d is the warpgroup's accumulator. A tile in shared memory is contracted
// along its rows, or over them.
//   set(d, Operand a, Operand b)                  d  = a b^T, both along their rows
//   set_in_place(d, Operand a, Operand b)         the same, in the registers that d had before
//   add(d, Operand a, Operand b)                  d += a b^T
//   add(d, const UInt32* a, Operand b, bool accumulate)
//                                                 d += a b, or d = a b; a in four registers, b over its rows
//   set_over_rows(d, Operand a, Operand b)        d  = a b, a along its rows, b over its rows
//   add_over_rows(d, Operand a, Operand b)        d += a b
// A result that is only set takes no registers until then. Where S comes in halves the compiler would find it new ones
// each time, and spill: there it is set in place.
template <int n, Element element>
struct Wgmma;

}  // namespace tessera::sm90

#include "sm90/ptx/wgmma_shapes.cuh"

namespace tessera::sm90 {

// "wgmma.fence", "wgmma.commit_group", "wgmma.wait_group".
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending>
__device__ inline void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// After waiting: the compiler may not have read these values before.
template <int count>
__device__ inline void arrived(float (&x)[count]) {
#pragma unroll
  for (int n = 0; n < count; ++n) asm volatile("" : "+f"(x[n])::"memory");
}

// Before multiplying: the compiler may not put off writing these operands.
template <int count>
__device__ inline void settled(UInt32 (&x)[count]) {
#pragma unroll
  for (int n = 0; n < count; ++n) asm volatile("" : "+r"(x[n])::"memory");
}

// "stmatrix": four registers of this warp's 16 rows and 16 columns.
__device__ inline void store_matrix(UInt32 address, UInt32 a, UInt32 b, UInt32 c, UInt32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// The same with the matrix turned over: a register's columns become rows.
__device__ inline void store_matrix_turned(UInt32 address, UInt32 a, UInt32 b, UInt32 c, UInt32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
}

}  // namespace tessera::sm90
