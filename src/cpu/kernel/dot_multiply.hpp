// SPDX-License-Identifier: Apache-2.0
// C (+)= A B by dot products of pairs of bf16 (AVX512_BF16), with the operands of the matrix unit: what
// matrix_multiply.hpp is there. Included by cpu/isa/avx512bf16.cpp inside its target region.
//
// One instruction multiplies 32 pairs and adds neighbours in f32, twice the work of a multiply-add, at its rate on
// AMD's Zen 4 and 5. (Intel's processors are slower at it than at multiply-adds: cpu/isa.cpp.) There is no second unit
// to keep busy, so products do not overlap with the softmax but come after it.
#pragma once

enum class Terms { most, all };  // as for several pieces; here there is one

struct Session {};  // nothing to set up

template <int rows, int cols>
HWY_INLINE void multiply_pairs(const Halves& a, const Pairs& b, float* c, Int64 ldc, Int64 depth, Result result) {
  Vec sum[rows][cols];
  TESSERA_UNROLL
  for (int m = 0; m < rows; ++m) TESSERA_UNROLL
  for (int n = 0; n < cols; ++n)
    sum[m][n] = result == Result::add ? load(c + m * ldc + n * lanes) : hn::Zero(FloatTag());
  const UInt32* columns = b.at;
  for (Int64 k = 0; k < depth; k += 2, columns += b.stride) {
    __m512i column[cols];
    TESSERA_UNROLL
    for (int n = 0; n < cols; ++n) column[n] = _mm512_loadu_si512(columns + n * lanes);
    TESSERA_UNROLL
    for (int m = 0; m < rows; ++m) {
      int pair;
      __builtin_memcpy(&pair, a.row(m) + k, sizeof(pair));
      const __m512i row = _mm512_set1_epi32(pair);
      TESSERA_UNROLL
      for (int n = 0; n < cols; ++n) sum[m][n] = add_pairs(sum[m][n], column[n], row);
    }
  }
  TESSERA_UNROLL
  for (int m = 0; m < rows; ++m) TESSERA_UNROLL
  for (int n = 0; n < cols; ++n) store(sum[m][n], c + m * ldc + n * lanes);
}

// All the rows of one column panel.
template <int rows_at_once, int cols>
HWY_NOINLINE void multiply_pair_panel(Halves a, const Pairs& b, float* c, Int64 ldc, Int64 rows, Int64 depth,
                                      Result result) {
  static_assert(tile_step % rows_at_once == 0);
  for (Int64 m = 0; m < rows; m += rows_at_once)
    multiply_pairs<rows_at_once, cols>({a.row(m), a.stride, a.piece}, b, c + m * ldc, ldc, depth, result);
}

// C [rows x width] (+)= A [rows x depth] B [depth x width], all three multiples of tile_step.
template <int pieces>
class Product {
 public:
  static_assert(pieces == 1);
  Product() = default;
  HWY_INLINE Product(Result result, Terms, const Halves& a, const Pairs& b, float* c, Int64 ldc, Int64 rows,
                     Int64 width, Int64 depth) :
      result(result),
      a(a), b(b), c(c), ldc(ldc), rows(rows), width(width), depth(depth) {}

  HWY_INLINE void finish() {
    Int64 n = 0;
    for (; n + 4 * lanes <= width; n += 4 * lanes)
      multiply_pair_panel<4, 4>(a, {b.at + n, b.stride, b.piece}, c + n, ldc, rows, depth, result);
    if (n < width) multiply_pair_panel<8, 2>(a, {b.at + n, b.stride, b.piece}, c + n, ldc, rows, depth, result);
    rows = 0;  // done
  }

 private:
  Result result = Result::replace;
  Halves a{};
  Pairs b{};
  float* c = nullptr;
  Int64 ldc = 0, rows = 0, width = 0, depth = 0;
};

template <int pieces>
class ProductsBeside {
 public:
  HWY_INLINE void add(const Product<pieces>& product) { list[count++] = product; }
  HWY_INLINE void start(Int64) {}
  HWY_INLINE void prefetch(const float*, Int64) {}
  HWY_INLINE void prefetch(PrefetchQueue& what) { queue = &what; }
  HWY_INLINE void advance() {
    if (queue) queue->advance();
  }
  HWY_INLINE void finish() {
    for (int n = 0; n < count; ++n) list[n].finish();
    count = 0;
  }

 private:
  Product<pieces> list[5];
  int count = 0;
  PrefetchQueue* queue = nullptr;
};
