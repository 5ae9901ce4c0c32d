// SPDX-License-Identifier: Apache-2.0
// Copies tiles of rows from global to shared memory, as f32: vector loads of 16 bytes where rows are aligned,
// asynchronous (cp.async) where no conversion is needed. Device code; included by the kernels that work on tiles.
#pragma once

#include "gpu/kernel/common.cuh"
#include "ladder/config.hpp"

namespace tessera::ladder {

// PTX ISA, "cp.async": copies 16 bytes asynchronously; `bytes` = 0 writes zeros instead. Before sm_80 the copy is
// synchronous.
__device__ inline void copy_async(float* to, const void* from, int bytes) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((UInt32)__cvta_generic_to_shared(to)), "l"(from),
               "r"(bytes));
#else
  const float4 zero = {0, 0, 0, 0};
  *reinterpret_cast<float4*>(to) = bytes ? *static_cast<const float4*>(from) : zero;
#endif
}

// The same for one number; 0 unless `inside`.
__device__ inline void copy_number_async(float* to, const float* from, bool inside) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"((UInt32)__cvta_generic_to_shared(to)), "l"(from),
               "r"(inside ? 4 : 0));
#else
  *to = inside ? *from : 0.0f;
#endif
}

// PTX ISA, "cp.async.commit_group" and "cp.async.wait_group".
__device__ inline void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;");
#endif
}
template <int pending>
__device__ inline void wait_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(pending));
#endif
}

// Eight 16-bit elements, loaded as 16 bytes.
template <class T>
struct alignas(16) Eight {
  T x[8];
};

__device__ inline float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ inline void store4(float* p, float4 x) { *reinterpret_cast<float4*>(p) = x; }

// Which part of a tile a thread copies. A row has `pieces` pieces; a thread copies one piece of every step-th row.
template <int threads, int pieces>
struct TileShare {
  static_assert(pieces <= threads);
  static constexpr int step = threads / pieces;
  const int piece = threadIdx.x % pieces;
  const int first_row = threadIdx.x / pieces < step ? threadIdx.x / pieces : 1 << 20;  // leftover threads copy none
};

// to[r][d] = row r of `from`, element d; 0 beyond `valid` rows and beyond D. Asynchronous: callers commit and wait.
template <Config config, int D, int rows, int pitch, Element element>
__device__ inline void load_tile(float (&to)[rows][pitch], const TileRows<element>& from, Int64 valid) {
  constexpr int width = tile_width(config, D);
  constexpr int at_once = !config.wide_loads                      ? 1
                          : element == Element::f32 && D % 4 == 0 ? 4
                          : element != Element::f32 && D % 8 == 0 ? 8
                                                                  : 1;
  using T = typename Stored<element>::Type;
  const TileShare<config.threads, lesser(width / at_once, config.threads)> share;
  const T* row = from.first + share.first_row * from.distance;
  // Predicates instead of branches: rows beyond a thread's share and pieces beyond D count as invalid. The address is
  // incremented row by row, which is cheaper than computing it. Unrolling by two overlaps the loads of two rows; under
  // the register pressure of dBias it would spill.
#pragma unroll(config.dbias == Element::none ? 2 : 1)
  for (int r = share.first_row; r < rows; r += share.step, row += share.step * from.distance)
#pragma unroll
    for (int d = share.piece * at_once; d < width; d += at_once * config.threads) {
      const bool inside = r < valid && d < D;
      if constexpr (at_once == 4) {
        copy_async(&to[r][d], inside ? row + d : from.tensor, inside ? 16 : 0);
      } else if constexpr (at_once == 8) {
        Eight<T> values{};
        if (inside) values = *reinterpret_cast<const Eight<T>*>(row + d);
        store4(&to[r][d], {to_float(values.x[0]), to_float(values.x[1]), to_float(values.x[2]), to_float(values.x[3])});
        store4(&to[r][d + 4],
               {to_float(values.x[4]), to_float(values.x[5]), to_float(values.x[6]), to_float(values.x[7])});
      } else if constexpr (element == Element::f32) {
        copy_number_async(&to[r][d], inside ? row + d : from.tensor, inside);
      } else {
        to[r][d] = inside ? to_float(row[d]) : 0.0f;
      }
    }
}

}  // namespace tessera::ladder
