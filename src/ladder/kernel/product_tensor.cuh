// SPDX-License-Identifier: Apache-2.0
// The products of `vector` by tensor cores at f32 accuracy (3xTF32): every f32 operand is split into the sum of two
// TF32 numbers, and of the four partial products only low times low is omitted. 16-bit operands are exact in TF32 and
// need one product. Device code; included by product.cuh, which says what a product must offer.
#pragma once

#include "ladder/kernel/tile.cuh"

namespace tessera::ladder {

// PTX ISA, "mma.m16n8k8", TF32: c += a b. Fragment layout: with g = lane / 4 and t = lane % 4, a lane holds
//   a: rows g, g + 8 (a[0], a[1]) at k = t, and again (a[2], a[3]) at k = t + 4
//   b: k = t and t + 4 of column g
//   c: columns 2 t, 2 t + 1 of row g (c[0], c[1]) and of row g + 8 (c[2], c[3])
// The low 13 bits of an operand are ignored.
__device__ inline void multiply_tf32(float (&c)[4], const UInt32 (&a)[4], const UInt32 (&b)[2]) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

__device__ inline UInt32 nearest_tf32(float x) {
#if __CUDA_ARCH__ >= 900
  UInt32 y;
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
#else
  return (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
#endif
}

// How an f32 number is converted to TF32, which has 11 significant bits.
enum class Tf32 {
  exact,    // no conversion: it was widened from 16 bits
  rounded,  // to the nearest one: enough for P and dS where the contract rounds them to 16 bits
  split     // high + low, each to the nearest: what is lost is below half a unit of f32's last place
};
constexpr Tf32 tf32_of(Element element) { return element == Element::f32 ? Tf32::split : Tf32::exact; }

// An operand fragment of multiply_tf32: `count` registers, twice that if split.
template <int count, Tf32 kind>
struct Operand {
  static constexpr bool has_low = kind == Tf32::split;
  UInt32 high[count], low[has_low ? count : 1];

  __device__ void set(int n, float x) {
    high[n] = kind == Tf32::exact ? __float_as_uint(x) : nearest_tf32(x);
    if constexpr (has_low) low[n] = __float_as_uint(x - __uint_as_float(high[n]));
  }
};

// c = sum over `steps` of a b. Tensor cores truncate after every addition. Small terms go first and accumulations are
// short, so that few truncations hit the large sum (docs/numerics.md).
template <int steps, Tf32 A, Tf32 B>
__device__ inline void multiply(float (&c)[4], const Operand<4, A> (&a)[steps], const Operand<2, B> (&b)[steps]) {
#pragma unroll
  for (int s = 0; s < steps; ++s) {
    if constexpr (Operand<4, A>::has_low) multiply_tf32(c, a[s].low, b[s].high);
    if constexpr (Operand<2, B>::has_low) multiply_tf32(c, a[s].high, b[s].low);
  }
#pragma unroll
  for (int s = 0; s < steps; ++s) multiply_tf32(c, a[s].high, b[s].high);
}

// A warp owns 16 rows, or a multiple of 16. The indices of an mma may be permuted freely, as long as both operands
// agree. This permutation has two aims. Every lane loads 16 bytes at a time without bank conflicts, from tiles whose
// pitch is 4 modulo 32 floats. And the accumulator layout of P is the operand layout of the next product, so that P
// needs no warp shuffles:
//   row or column n of 8 is row or column `spread(n)`, 0 4 1 5 2 6 3 7: numbers 2 t and 2 t + 1 are 4 apart
//   of 16 dims, lane t has 4 t ... 4 t + 3: the first two are k = t and t + 4 of one instruction, the others of another
//   of 32 columns of a result, column n of instruction e is 4 spread(n) + e
template <Config config>
struct TensorProduct {
  static constexpr int lanes = tensor_lanes;
  static constexpr int rows = config.rows_per_thread, cols = config.block_cols / lanes;
  static constexpr int row_tiles = rows / 2;  // of 16
  static_assert(rows % 2 == 0 && config.block_rows == config.threads / 32 * 16 * row_tiles);
  static_assert(config.block_cols % 16 == 0);

  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int row0 = threadIdx.x / 32 * 16 * row_tiles + spread(g);

  __device__ static int spread(int n) { return n / 2 + n % 2 * 4; }
  __device__ int row(int r) const { return row0 + 16 * (r / 2) + 8 * (r % 2); }
  __device__ static constexpr int col_offset(int c) { return 8 * (c / 2) + 4 * (c % 2); }
  __device__ int col(int c) const { return t + col_offset(c); }
  __device__ int out_col(int n) const { return 32 * (n / 8) + 16 * (n / 4 % 2) + 4 * t + n % 4; }

  // 16 dims at a time.
  template <int D, Element a_element, Element b_element, class A, class B>
  __device__ void over_dims(const A& a, const B& b, float (&result)[rows][cols]) const {
#pragma unroll
    for (int r = 0; r < rows; ++r)
#pragma unroll
      for (int c = 0; c < cols; ++c) result[r][c] = 0;
#pragma unroll 1
    for (int d = 0; d < D; d += 16) {
      Operand<4, tf32_of(a_element)> row_operand[row_tiles][2];
#pragma unroll
      for (int r = 0; r < rows; ++r) set_row(row_operand[r / 2], r % 2, load4(&a[row(r)][d + 4 * t]));
#pragma unroll
      for (int n = 0; n < cols / 2; ++n) {
        const float4 values = load4(&b[8 * n + spread(g)][d + 4 * t]);
        Operand<2, tf32_of(b_element)> col_operand[2];
        col_operand[0].set(0, values.x), col_operand[0].set(1, values.y);
        col_operand[1].set(0, values.z), col_operand[1].set(1, values.w);
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) {
          float part[4] = {};
          multiply(part, row_operand[m], col_operand);
#pragma unroll
          for (int e = 0; e < 4; ++e) result[2 * m + e / 2][2 * n + e % 2] += part[e];
        }
      }
    }
  }

  // 16 of the tile's columns at a time, and 32 columns of the result. One f32 partial sum per tile. A thread keeps its
  // own P in shared memory (`scratch`): an array in registers can only be indexed by a fully unrolled loop, whose loads
  // the compiler would hoist, all at once: register pressure.
  template <Element b_element, class Scratch, class B, int outs>
  __device__ void over_columns(const float (&p)[rows][cols], Scratch& scratch, const B& b, const float (&factor)[rows],
                               float (&result)[rows][outs]) const {
    constexpr Tf32 p_kind = config.element == Element::f32 ? Tf32::split : Tf32::rounded;
#pragma unroll
    for (int r = 0; r < rows; ++r)
#pragma unroll
      for (int c = 0; c < cols; c += 4)
        store4(&scratch[row(r)][4 * (c + t)], {p[r][c], p[r][c + 1], p[r][c + 2], p[r][c + 3]});
#pragma unroll
    for (int group = 0; group < outs / 8; ++group) {
      float part[rows][8] = {};
#pragma unroll 1
      for (int j = 0; j < config.block_cols; j += 16) {
        Operand<4, p_kind> row_operand[row_tiles][2];
        Operand<2, tf32_of(b_element)> col_operand[4][2];
#pragma unroll
        for (int r = 0; r < rows; ++r) set_row(row_operand[r / 2], r % 2, load4(&scratch[row(r)][j + 4 * t]));
#pragma unroll
        for (int s = 0; s < 2; ++s)
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const float4 values = load4(&b[j + 8 * s + 4 * k + t][32 * group + 4 * spread(g)]);
            col_operand[0][s].set(k, values.x), col_operand[1][s].set(k, values.y);
            col_operand[2][s].set(k, values.z), col_operand[3][s].set(k, values.w);
          }
#pragma unroll
        for (int e = 0; e < 4; ++e)
#pragma unroll
          for (int m = 0; m < row_tiles; ++m) {
            float sum[4] = {};
            multiply(sum, row_operand[m], col_operand[e]);
            part[2 * m][e] += sum[0], part[2 * m][4 + e] += sum[1];
            part[2 * m + 1][e] += sum[2], part[2 * m + 1][4 + e] += sum[3];
          }
      }
#pragma unroll
      for (int r = 0; r < rows; ++r)
#pragma unroll
        for (int n = 0; n < 8; ++n) result[r][8 * group + n] = fmaf(result[r][8 * group + n], factor[r], part[r][n]);
    }
  }

 private:
  // Row `half` (0: g, 1: g + 8) of the fragments of two k-steps: k = t, t + 4 of the first, then of the second.
  template <Tf32 kind>
  __device__ static void set_row(Operand<4, kind> (&operand)[2], int half, float4 values) {
    operand[0].set(half, values.x), operand[0].set(half + 2, values.y);
    operand[1].set(half, values.z), operand[1].set(half + 2, values.w);
  }
};

}  // namespace tessera::ladder
