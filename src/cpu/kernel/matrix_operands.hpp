// SPDX-License-Identifier: Apache-2.0
// Operands of the matrix unit. A number is a sum of `pieces` bf16: 1 for bf16, 2 for f16 and 3 for f32 are exact. Left
// operands are rows of 16-bit numbers; right ones are rows of 32-bit pairs, two neighbours along the depth of the
// product. Included by cpu/isa/amx.cpp inside its target region.
#pragma once

inline constexpr Int64 tile_step = 32;  // rows, widths and depths of products are multiples of two tiles or one depth
constexpr Int64 tiled(Int64 n) { return round_up(n, tile_step); }

// [pieces][rows][stride]
struct Halves {
  UInt16* at;
  Int64 stride, piece;
  HWY_INLINE UInt16* row(Int64 r, int p = 0) const { return at + p * piece + r * stride; }
};
struct Pairs {
  UInt32* at;
  Int64 stride, piece;
  HWY_INLINE UInt32* row(Int64 r, int p = 0) const { return at + p * piece + r * stride; }
};

template <int pieces>
HWY_INLINE Halves take_halves(Scratch& s, Int64 rows, Int64 stride) {
  return {reinterpret_cast<UInt16*>(s.take(pieces * rows * stride / 2)), stride, rows * stride};
}
template <int pieces>
HWY_INLINE Pairs take_pairs(Scratch& s, Int64 rows, Int64 stride) {
  return {reinterpret_cast<UInt32*>(s.take(pieces * rows * stride)), stride, rows * stride};
}

// --- from f32 to pieces

// 32 numbers of bf16: 16 of `low` first, or the pairs (low, high).
enum class Order { behind, in_pairs };

// f32 whose last 16 bits are 0.
template <Order order>
HWY_INLINE __m512i upper_halves(Vec low, Vec high) {
  const __m512i x = _mm512_castps_si512(low.raw), y = _mm512_castps_si512(high.raw);
  if (order == Order::in_pairs) return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(x, 16), y);
  const __m512i places = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                                          25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return _mm512_permutex2var_epi16(x, places, y);
}

// f32 rounded to bf16; pairs by integer arithmetic, which leaves the one shuffle port alone (ties go away from 0).
template <Order order>
HWY_INLINE __m512i rounded_halves(Vec low, Vec high) {
  if (order == Order::behind) return bf16_halves(low, high);
  const __m512i half = _mm512_set1_epi32(0x8000);
  return upper_halves<order>(Vec{_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(low.raw), half))},
                             Vec{_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(high.raw), half))});
}

// The first 8 bits of x, as f32, leave x; they are what is returned. Infinity leaves nothing: its rest would be NaN.
template <bool may_be_infinite>
HWY_INLINE Vec take_piece(Vec& x) {
  const Vec piece{_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x.raw), _mm512_set1_epi32(-65536)))};
  const Vec rest = hn::Sub(x, piece);
  x = may_be_infinite ? hn::IfThenZeroElse(hn::Eq(hn::Abs(x), set(infinity)), rest) : rest;
  return piece;
}

// 32 numbers become pieces of bf16. Of more than one, each has the next 8 bits, so that two hold every f16 and three
// every f32; a single one is rounded.
template <int pieces, Order order, bool may_be_infinite>
HWY_INLINE void split(Vec low, Vec high, __m512i out[pieces]) {
  if (pieces == 1) out[0] = rounded_halves<order>(low, high);
  TESSERA_UNROLL
  for (int p = 0; p < pieces && pieces > 1; ++p) {
    const Vec low_piece = take_piece<may_be_infinite>(low), high_piece = take_piece<may_be_infinite>(high);
    out[p] = upper_halves<order>(low_piece, high_piece);
  }
}

template <int pieces>
HWY_INLINE void clear_row(const Halves& out, Int64 r) {
  for (int p = 0; p < pieces; ++p)
    for (Int64 d = 0; d < out.stride; d += 32) _mm512_storeu_si512(out.row(r, p) + d, _mm512_setzero_si512());
}

// Row r of `out` becomes row i of the source, with zeros behind `width`.
template <int pieces, class Source>
HWY_INLINE void split_row(const Source& source, Int64 i, Int64 width, const Halves& out, Int64 r) {
  if (pieces == 1 && source.type == Type::bf16) {
    const UInt16* from = reinterpret_cast<const UInt16*>(source.row(i));
    for (Int64 d = 0; d < out.stride; d += 32) {
      const Int64 left = width - d;
      const __mmask32 there = left >= 32 ? ~__mmask32(0) : (__mmask32(1) << left) - 1;
      _mm512_storeu_si512(out.row(r) + d, _mm512_maskz_loadu_epi16(there, from + d));
    }
    return;
  }
  HWY_ALIGN float row[tiled(576)];
  widen_row(source, i, width, 1.0f, row);
  for (Int64 d = width; d < out.stride; ++d) row[d] = 0;
  for (Int64 d = 0; d < out.stride; d += 32) {
    __m512i halves[pieces];
    split<pieces, Order::behind, true>(load(row + d), load(row + d + 16), halves);
    for (int p = 0; p < pieces; ++p) _mm512_storeu_si512(out.row(r, p) + d, halves[p]);
  }
}

// Pairs of neighbours within a row: out[d / 2][r] = (in[r][d], in[r][d + 1]).
template <int pieces>
HWY_NOINLINE void pair_columns(const Halves& in, Int64 rows, const Pairs& out) {
  for (int p = 0; p < pieces; ++p)
    for (Int64 r = 0; r < rows; r += 16)
      for (Int64 d = 0; d < in.stride; d += 32) {
        __m512i x[16];
        for (int n = 0; n < 16; ++n) x[n] = _mm512_loadu_si512(in.row(r + n, p) + d);
        transpose_words(x, out.row(d / 2, p) + r, out.stride);
      }
}

// (in[r][d + n], in[r + 1][d + n]) for n = 0 .. 15
HWY_INLINE __m512i row_pair(const UInt16* row, const UInt16* next) {
  const __m512i even = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row)));
  const __m512i odd = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(next)));
  return _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
}

// Pairs of neighbouring rows: out[r / 2][d] = (in[r][d], in[r + 1][d]).
template <int pieces>
HWY_NOINLINE void pair_rows(const Halves& in, Int64 rows, const Pairs& out) {
  for (int p = 0; p < pieces; ++p)
    for (Int64 r = 0; r < rows; r += 2)
      for (Int64 d = 0; d < in.stride; d += 16)
        _mm512_storeu_si512(out.row(r / 2, p) + d, row_pair(in.row(r, p) + d, in.row(r + 1, p) + d));
}

// out[d][r] = in[r][d]
template <int pieces>
HWY_NOINLINE void transpose_halves(const Halves& in, Int64 rows, const Halves& out) {
  for (int p = 0; p < pieces; ++p)
    for (Int64 r = 0; r < rows; r += 32)
      for (Int64 d = 0; d < in.stride; d += 16) {
        __m512i x[16];
        for (int n = 0; n < 16; ++n) x[n] = row_pair(in.row(r + 2 * n, p) + d, in.row(r + 2 * n + 1, p) + d);
        transpose_words(x, reinterpret_cast<UInt32*>(out.row(d, p) + r), out.stride / 2);
      }
}

// Rows j and j + 1 of a tile of f32 as a row of a right operand whose depth is the tile's keys.
template <int pieces>
struct AsPairs {
  static constexpr Exactness exactness = pieces < 3 ? Exactness::halves : Exactness::f32;
  Pairs out;
  const float* scales = nullptr;  // of the keys' values, if they have any: they join the numbers that are kept
  HWY_INLINE void keep(Int64 j, Int64 i, Vec even, Vec odd) const {
    if (scales) even = hn::Mul(even, set(scales[j])), odd = hn::Mul(odd, set(scales[j + 1]));
    __m512i halves[pieces];
    split<pieces, Order::in_pairs, false>(even, odd, halves);
    for (int p = 0; p < pieces; ++p) _mm512_storeu_si512(out.row(j / 2, p) + i, halves[p]);
  }
  HWY_INLINE void keep_tile(const Tile& tile, const float* X) const {
    for (Int64 j = 0; j < tile.nj; j += 2)
      for (Int64 i = 0; i < tile.width; i += lanes) {
        const float* at = X + j * block_q + i;
        keep(j, i, load(at), j + 1 < tile.nj ? load(at + block_q) : hn::Zero(FloatTag()));
      }
  }
};

// A product takes whole tiles of depth: zeros behind the last key.
template <int pieces>
HWY_INLINE void clear_pairs_behind(const Tile& tile, const Pairs& out) {
  for (int p = 0; p < pieces; ++p)
    for (Int64 row = (tile.nj + 1) / 2; row < tiled(tile.nj) / 2; ++row)
      for (Int64 i = 0; i < tile.width; i += lanes) _mm512_storeu_si512(out.row(row, p) + i, _mm512_setzero_si512());
}

// 32 numbers of row j of a tile as part of a left operand whose rows are the tile's keys.
template <int pieces>
HWY_INLINE void keep_row(const Halves& out, Int64 j, Int64 i, Vec low, Vec high) {
  __m512i halves[pieces];
  split<pieces, Order::behind, false>(low, high, halves);
  for (int p = 0; p < pieces; ++p) _mm512_storeu_si512(out.row(j, p) + i, halves[p]);
}

// A whole tile of f32.
template <int pieces>
HWY_NOINLINE void split_keys(const Tile& tile, const float* X, const Halves& out) {
  for (Int64 j = 0; j < tile.nj; ++j)
    for (Int64 i = 0; i < tile.width; i += 32)
      keep_row<pieces>(out, j, i, load(X + j * block_q + i), load(X + j * block_q + i + lanes));
}
