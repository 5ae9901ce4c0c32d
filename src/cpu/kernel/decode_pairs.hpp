// SPDX-License-Identifier: Apache-2.0
// K and V as bf16 for decoding by dot products of pairs (AVX512_BF16): half as many instructions as multiply-adds in
// f32, and 8-bit numbers, which bf16 holds exactly, need not become f32. A pair of K is two neighbours of a row, and Q
// is bf16 as it came; a pair of V is what two keys have in one dim, and P is rounded to bf16, as the contract's model
// does. Rows of Q and O are kept in the order in which numbers come out of registers here. Included by
// cpu/isa/avx512bf16.cpp inside its target region.
#pragma once

struct DotBF16 {
  static constexpr int value_vectors = 2;
  UInt16 bits;
};
struct DotE4M3 {
  static constexpr int value_vectors = 4;
  uint8_t bits;
};
struct DotI8 {
  static constexpr int value_vectors = 4;
  uint8_t bits;
};
template <class T>
concept DotByte = DotNumber<T> && sizeof(T) == 1;
template <>
inline constexpr int vectors_together<DotBF16> = 1;

template <DotNumber T>
HWY_INLINE Vec add_product(T, Vec sum, Vec x, Vec y) {
  return add_pairs(sum, _mm512_castps_si512(x.raw), _mm512_castps_si512(y.raw));
}

HWY_INLINE Vec as_vector(__m512i pairs) { return Vec{_mm512_castsi512_ps(pairs)}; }

// i8 by tables of the two bytes of its magnitude, 0 to 128. The tables have 128 entries: number 0 is that of 128, and
// the zeros are left out.
struct I8Tables {
  alignas(64) uint8_t low[128], high[128];
};
constexpr I8Tables make_i8_tables() {
  I8Tables t{};
  for (int n = 0; n < 128; ++n) {
    const UInt32 bits = __builtin_bit_cast(UInt32, float(n == 0 ? 128 : n));
    t.low[n] = uint8_t(bits >> 16), t.high[n] = uint8_t(bits >> 24);
  }
  return t;
}
static constexpr I8Tables i8_tables = make_i8_tables();
static_assert(i8_tables.low[0] == 0);  // zero's, too

HWY_INLINE __m512i look_up_where(__mmask64 where, const uint8_t* table, __m512i bytes) {
  const __m512i first = _mm512_load_si512(table), second = _mm512_load_si512(table + 64);
  asm("vpermi2b %2, %1, %0 %{%3%}%{z%}" : "+v"(bytes) : "v"(first), "v"(second), "Yk"(where));
  return bytes;
}

HWY_INLINE __m512i low_bytes(DotE4M3, __m512i bytes) { return look_up(tables.low, bytes); }
HWY_INLINE __m512i high_bytes(DotE4M3, __m512i bytes) { return with_sign(look_up(tables.high, bytes), bytes); }
HWY_INLINE __m512i low_bytes(DotI8, __m512i bytes) { return look_up(i8_tables.low, _mm512_abs_epi8(bytes)); }
HWY_INLINE __m512i high_bytes(DotI8, __m512i bytes) {
  const __mmask64 some = _mm512_test_epi8_mask(bytes, bytes);
  return with_sign(look_up_where(some, i8_tables.high, _mm512_abs_epi8(bytes)), bytes);
}

// 64 numbers as bf16: the first vector has numbers 16 n .. 16 n + 7, the second the others.
template <DotByte T>
HWY_INLINE void widen_bytes(T type, __m512i bytes, Vec& first, Vec& second) {
  const __m512i low = low_bytes(type, bytes), high = high_bytes(type, bytes);
  first = as_vector(_mm512_unpacklo_epi8(low, high)), second = as_vector(_mm512_unpackhi_epi8(low, high));
}

// --- K: pairs of neighbours

HWY_INLINE void widen_several(const DotBF16* p, Vec (&out)[1]) { out[0] = as_vector(_mm512_loadu_si512(p)); }
template <DotByte T>
HWY_INLINE void widen_several(const T* p, Vec (&out)[2]) {
  widen_bytes(T(), _mm512_loadu_si512(p), out[0], out[1]);
}

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
template <DotByte T>
HWY_INLINE void widen_values(const T* p, const T* second, Vec (&out)[4]) {
  const __m512i x = _mm512_loadu_si512(p), y = _mm512_loadu_si512(second);
  widen_bytes(T(), _mm512_unpacklo_epi8(x, y), out[0], out[1]);
  widen_bytes(T(), _mm512_unpackhi_epi8(x, y), out[2], out[3]);
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
  if (type == Type::bf16) return width % 32 == 0;
  return (type == Type::e4m3 || type == Type::i8) && width % 64 == 0 && has_tables();
}
HWY_INLINE bool takes_pairs(const HeadJob& head) {
  return head.q.type == Type::bf16 && !head.qv && fits_pairs(head.k.type, head.D) && fits_pairs(head.v.type, head.Dv);
}
HWY_INLINE Reading paired_reading(Type type) {
  if (type == Type::bf16) return Reading::dot_bf16;
  return type == Type::e4m3 ? Reading::dot_e4m3 : Reading::dot_i8;
}
