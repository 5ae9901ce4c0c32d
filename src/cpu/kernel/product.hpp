// SPDX-License-Identifier: Apache-2.0
// The one matrix product of the CPU kernels, C (+)= A B in f32: rows of A are broadcast, columns of B fill the lanes.
// Five products of attention are this one with different operands; each element sums over k in order, so its bits do
// not depend on the shape of the register block. Included by cpu/isa/*.cpp inside their target region.
#pragma once

// How A lies in memory: element (m, k) is a[m * lda + k], or transposed a[k * lda + m].
enum class Operand { rows, transposed };
enum class Result { replace, add };

// A register block is block_rows x block_cols accumulators, plus one vector per column and one broadcast: as many as
// fit without spills.
inline constexpr int block_rows = 6;
inline constexpr int block_cols = HWY_TARGET == HWY_AVX3 || HWY_ARCH_ARM_A64 ? 4 : 2;

template <int rows, int cols, Operand layout, Result result>
HWY_INLINE void multiply_block(const float* HWY_RESTRICT a, Int64 lda, const float* HWY_RESTRICT b, Int64 ldb,
                               float* HWY_RESTRICT c, Int64 ldc, Int64 depth) {
  Vec sum[rows][cols];
  TESSERA_UNROLL
  for (int m = 0; m < rows; ++m) TESSERA_UNROLL
  for (int n = 0; n < cols; ++n) sum[m][n] = hn::Zero(FloatTag());
  for (Int64 k = 0; k < depth; ++k) {
    Vec column[cols];
    TESSERA_UNROLL
    for (int n = 0; n < cols; ++n) column[n] = load(b + n * lanes);
    b += ldb;
    TESSERA_UNROLL
    for (int m = 0; m < rows; ++m) {
      const Vec row = set(layout == Operand::rows ? a[m * lda + k] : a[m]);
      TESSERA_UNROLL
      for (int n = 0; n < cols; ++n) sum[m][n] = hn::MulAdd(row, column[n], sum[m][n]);
    }
    if (layout == Operand::transposed) a += lda;
  }
  TESSERA_UNROLL
  for (int m = 0; m < rows; ++m) TESSERA_UNROLL
  for (int n = 0; n < cols; ++n) {
    float* out = c + m * ldc + n * lanes;
    store(result == Result::add ? hn::Add(load(out), sum[m][n]) : sum[m][n], out);
  }
}

// All the rows of one column panel. The panel of B stays in the L1 cache while the rows of A go by.
template <int cols, Operand layout, Result result>
HWY_NOINLINE void multiply_panel(const float* a, Int64 lda, const float* b, Int64 ldb, float* c, Int64 ldc, Int64 rows,
                                 Int64 depth) {
  const Int64 step = layout == Operand::rows ? lda : 1;
  for (; rows >= block_rows; rows -= block_rows) {
    multiply_block<block_rows, cols, layout, result>(a, lda, b, ldb, c, ldc, depth);
    a += block_rows * step;
    c += block_rows * ldc;
  }
  if (rows == 5) multiply_block<5, cols, layout, result>(a, lda, b, ldb, c, ldc, depth);
  if (rows == 4) multiply_block<4, cols, layout, result>(a, lda, b, ldb, c, ldc, depth);
  if (rows == 3) multiply_block<3, cols, layout, result>(a, lda, b, ldb, c, ldc, depth);
  if (rows == 2) multiply_block<2, cols, layout, result>(a, lda, b, ldb, c, ldc, depth);
  if (rows == 1) multiply_block<1, cols, layout, result>(a, lda, b, ldb, c, ldc, depth);
}

// C [rows x width] (+)= A [rows x depth] B [depth x width], the whole depth as one dependency chain per element.
template <Operand layout, Result result>
HWY_INLINE void multiply_chain(const float* a, Int64 lda, const float* b, Int64 ldb, float* c, Int64 ldc, Int64 rows,
                               Int64 width, Int64 depth) {
  constexpr Int64 panel = block_cols * lanes;
  Int64 n = 0;
  for (; n + panel <= width; n += panel)
    multiply_panel<block_cols, layout, result>(a, lda, b + n, ldb, c + n, ldc, rows, depth);
  for (; n + 2 * lanes <= width; n += 2 * lanes)
    multiply_panel<2, layout, result>(a, lda, b + n, ldb, c + n, ldc, rows, depth);
  if (n < width) multiply_panel<1, layout, result>(a, lda, b + n, ldb, c + n, ldc, rows, depth);
}

// C [rows x width] (+)= A [rows x depth] B [depth x width]. width is a multiple of the lanes. Terms of one sign and
// size drift in f32, each addition rounding the same way; short chains, summed, keep that within the accuracy promise.
template <Operand layout, Result result>
HWY_INLINE void multiply(const float* a, Int64 lda, const float* b, Int64 ldb, float* c, Int64 ldc, Int64 rows,
                         Int64 width, Int64 depth) {
  constexpr Int64 chain = 64;
  multiply_chain<layout, result>(a, lda, b, ldb, c, ldc, rows, width, lesser(depth, chain));
  for (Int64 k = chain; k < depth; k += chain)
    multiply_chain<layout, Result::add>(a + (layout == Operand::rows ? k : k * lda), lda, b + k * ldb, ldb, c, ldc,
                                        rows, width, lesser(depth - k, chain));
}
