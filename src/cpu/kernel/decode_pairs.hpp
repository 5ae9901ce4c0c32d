// SPDX-License-Identifier: Apache-2.0
// K and V as bf16 for decoding by dot products of pairs (AVX512_BF16): half as many instructions as multiply-adds in
// f32, and e4m3, which bf16 holds exactly, need not become f32. A pair of K is two neighbours of a row, and Q is bf16
// as it came; a pair of V is what two keys have in one dim, and P is rounded to bf16, as the contract's model does.
// Rows of Q and O are kept in the order in which numbers come out of registers here. (i8 stays with multiply-adds: its
// way to bf16 costs as much as it saves.) Included by cpu/isa/avx512bf16.cpp inside its target region.
#pragma once

struct DotBF16 {
  static constexpr int value_vectors = 2;
  UInt16 bits;
};
struct DotE4M3 {
  static constexpr int value_vectors = 4;
  uint8_t bits;
};
template <>
inline constexpr int vectors_together<DotBF16> = 1;

template <DotNumber T>
HWY_INLINE Vec add_product(T, Vec sum, Vec x, Vec y) {
  return add_pairs(sum, _mm512_castps_si512(x.raw), _mm512_castps_si512(y.raw));
}

HWY_INLINE Vec as_vector(__m512i pairs) { return Vec{_mm512_castsi512_ps(pairs)}; }

// 64 numbers of e4m3 as bf16: the first vector has numbers 16 n .. 16 n + 7, the second the others.
HWY_INLINE void widen_bytes(__m512i bytes, Vec& first, Vec& second) {
  const __m512i low = look_up(tables.low, bytes), high = with_sign(look_up(tables.high, bytes), bytes);
  first = as_vector(_mm512_unpacklo_epi8(low, high)), second = as_vector(_mm512_unpackhi_epi8(low, high));
}

// --- K: pairs of neighbours

HWY_INLINE void widen_several(const DotBF16* p, Vec (&out)[1]) { out[0] = as_vector(_mm512_loadu_si512(p)); }
HWY_INLINE void widen_several(const DotE4M3* p, Vec (&out)[2]) { widen_bytes(_mm512_loadu_si512(p), out[0], out[1]); }

// A row of Q in that order. `as` is how K is read.
HWY_INLINE void load_paired_query(const Rows& source, Int64 i, Reading as, Int64 width, float* out) {
  const char* row = source.row(i);
  char* pairs = reinterpret_cast<char*>(out);
  if (as == Reading::dot_bf16) {
    __builtin_memcpy(pairs, row, UInt64(width) * 2);
    return;
  }
  for (Int64 d = 0; d < width; d += 8) {  // of eight blocks of eight numbers, the even ones come first
    const Int64 n = d / 8 % 8, place = d / 64 * 64 + n % 2 * 32 + n / 2 * 8;
    __builtin_memcpy(pairs + place * 2, row + d * 2, 16);
  }
}

// --- V: pairs of keys

HWY_INLINE void widen_values(const DotBF16* p, const DotBF16* second, Vec (&out)[2]) {
  const __m512i x = _mm512_loadu_si512(p), y = _mm512_loadu_si512(second);
  out[0] = as_vector(_mm512_unpacklo_epi16(x, y)), out[1] = as_vector(_mm512_unpackhi_epi16(x, y));
}
HWY_INLINE void widen_values(const DotE4M3* p, const DotE4M3* second, Vec (&out)[4]) {
  const __m512i x = _mm512_loadu_si512(p), y = _mm512_loadu_si512(second);
  widen_bytes(_mm512_unpacklo_epi8(x, y), out[0], out[1]);
  widen_bytes(_mm512_unpackhi_epi8(x, y), out[2], out[3]);
}

// A row of O out of that order: fours of dims went round through the vectors.
template <Int64 vectors>
HWY_INLINE void in_order(const float* O, Int64 width, float* out) {
  for (Int64 d = 0; d < width; d += vectors * lanes)
    for (Int64 n = 0; n < 4 * vectors; ++n)
      __builtin_memcpy(out + d + 4 * n, O + d + n % vectors * lanes + n / vectors * 4, 4 * sizeof(float));
}
// `as` is how V is read.
HWY_INLINE void store_paired_row(const float* O, Reading as, Int64 width, float* out) {
  if (as == Reading::dot_bf16) return in_order<DotBF16::value_vectors>(O, width, out);
  in_order<DotE4M3::value_vectors>(O, width, out);
}

// Rows of P, times the values' scales if there are any, rounded to bf16: a pair of keys where one key was.
HWY_INLINE void pair_weights(const float* scales, Int64 rows, const float* P, float* out) {
  static_assert(decode_step == 2 * lanes);
  const Vec first = scales ? load(scales) : set(1), second = scales ? load(scales + lanes) : set(1);
  for (Int64 r = 0; r < rows; ++r) {
    const float* row = P + r * score_stride;
    const __m512i pairs = bf16_halves(hn::Mul(load(row), first), hn::Mul(load(row + lanes), second));
    _mm512_storeu_si512(out + r * score_stride, pairs);
  }
}

// --- which rows are read this way

HWY_INLINE bool fits_pairs(Type type, Int64 width) {
  return type == Type::bf16 ? width % 32 == 0 : type == Type::e4m3 && width % 64 == 0 && has_tables();
}
HWY_INLINE bool takes_pairs(const HeadJob& head) {
  return head.q.type == Type::bf16 && !head.qv && fits_pairs(head.k.type, head.D) && fits_pairs(head.v.type, head.Dv);
}
HWY_INLINE Reading paired_reading(Type type) { return type == Type::bf16 ? Reading::dot_bf16 : Reading::dot_e4m3; }
