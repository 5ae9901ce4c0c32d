// SPDX-License-Identifier: Apache-2.0
// Numbers of K and V as decoding reads them: a few vectors of a row at a time, widened in registers, the numbers in
// their order unless a tag below says otherwise. Included by cpu/isa/*.cpp inside their target region.
#pragma once

inline constexpr Int64 pair_width = 2 * lanes;
inline constexpr Int64 score_stride = decode_step;  // floats from row to row of S

// How rows are read: widened to f32, or (dot_*, decode_pairs.hpp) as bf16.
enum class Reading { f32, f16, bf16, paired_bf16, i8, e4m3, tabled_e4m3, dot_bf16, dot_e4m3, dot_i8 };

HWY_INLINE bool in_pairs(Reading as) { return as >= Reading::dot_bf16; }

// Numbers of decode_pairs.hpp, which say how many vectors two keys of V become.
template <class T>
concept DotNumber = requires {
  T::value_vectors;
};

// Numbers of K in a vector, and how many vectors are widened together; keys of V that are multiplied together, and how
// many vectors of them are widened together.
template <class T>
inline constexpr Int64 numbers_in_vector = DotNumber<T> ? 2 * lanes : lanes;
template <class T>
inline constexpr int vectors_together = 2;
template <class T>
inline constexpr Int64 keys_together = DotNumber<T> ? 2 : 1;
template <class T>
inline constexpr int value_vectors_together = vectors_together<T>;
template <DotNumber T>
inline constexpr int value_vectors_together<T> = T::value_vectors;

template <class T>
HWY_INLINE void widen_several(const T* p, Vec (&out)[2]) {
  out[0] = widen_vector(p), out[1] = widen_vector(p + lanes);
}
// Of V: where keys are multiplied together, `second` is the row of the second one.
template <class T, int count>
HWY_INLINE void widen_values(const T* p, const T* second, Vec (&out)[count]) {
  (void)second;
  widen_several(p, out);
}

template <class T>
HWY_INLINE Vec add_product(T, Vec sum, Vec x, Vec y) {
  return hn::MulAdd(x, y, sum);
}

// bf16 in rows whose length is a multiple of two vectors. Two vectors at a time are widened by one instruction each if
// the first gets the numbers with even places and the second those with odd ones; rows of Q and O are then kept in that
// order.
struct PairedBF16 {
  UInt16 bits;
};

HWY_INLINE void widen_several(const PairedBF16* p, Vec (&out)[2]) {
  const auto both = hn::BitCast(IntTag(), load(reinterpret_cast<const float*>(p)));
  out[0] = hn::BitCast(FloatTag(), hn::ShiftLeft<16>(both));
  out[1] = hn::BitCast(FloatTag(), hn::And(both, hn::Set(IntTag(), -65536)));
}
// Such rows have no single vector.
HWY_INLINE Vec widen_vector(const PairedBF16*) { return hn::Zero(FloatTag()); }

// e4m3 becomes f16 by moving its bits, subnormal numbers included, if what f16 says is taken 2^8 times; Q takes the
// factor in, and O in the end. Where an instruction makes f32 of f16 this is cheaper than straight to f32, which
// normalises every number.
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2
struct MovedE4M3 {
  uint8_t bits;
};
using EachE4M3 = MovedE4M3;
inline constexpr float e4m3_factor = 256;

template <class Words>
HWY_INLINE hn::Vec<Words> move_numbers(Words words, const MovedE4M3* from) {
  const hn::Rebind<int8_t, Words> bytes;
  const auto bits = hn::PromoteTo(words, hn::LoadU(bytes, reinterpret_cast<const int8_t*>(from)));
  const auto largest = hn::Set(words, 0x7f);
  const auto moved = hn::AndNot(hn::Set(words, 0x4000), hn::ShiftLeft<7>(bits));  // the sign is in two bits
  return hn::IfThenElse(hn::Eq(hn::And(bits, largest), largest), hn::Set(words, 0x7e00), moved);  // NaN
}
#else
using EachE4M3 = E4M3;
inline constexpr float e4m3_factor = 1;
#endif

#if HWY_TARGET == HWY_AVX3
HWY_INLINE void widen_several(const MovedE4M3* p, Vec (&out)[2]) {
  const __m512i words = move_numbers(hn::ScalableTag<int16_t>(), p).raw;
  out[0] = Vec{_mm512_cvtph_ps(_mm512_castsi512_si256(words))};
  out[1] = Vec{_mm512_cvtph_ps(_mm512_extracti64x4_epi64(words, 1))};
}
HWY_INLINE Vec widen_vector(const MovedE4M3* p) {
  return Vec{_mm512_cvtph_ps(move_numbers(hn::Half<hn::ScalableTag<int16_t>>(), p).raw)};
}
#elif HWY_TARGET == HWY_AVX2
HWY_INLINE void widen_several(const MovedE4M3* p, Vec (&out)[2]) {
  const __m256i words = move_numbers(hn::ScalableTag<int16_t>(), p).raw;
  out[0] = Vec{_mm256_cvtph_ps(_mm256_castsi256_si128(words))};
  out[1] = Vec{_mm256_cvtph_ps(_mm256_extracti128_si256(words, 1))};
}
HWY_INLINE Vec widen_vector(const MovedE4M3* p) {
  return Vec{_mm256_cvtph_ps(move_numbers(hn::Half<hn::ScalableTag<int16_t>>(), p).raw)};
}
#endif

// e4m3 becomes bf16, which holds all its numbers, by tables of the two bytes: AVX512_VBMI looks 64 numbers up at once.
// In rows whose length is a multiple of four vectors. The instructions are assembly: the target region is that of
// processors without them, and has_tables() is asked first.
#if HWY_TARGET == HWY_AVX3
struct TabledE4M3 {
  uint8_t bits;
};

template <>
inline constexpr int vectors_together<TabledE4M3> = 4;

struct E4M3Tables {
  alignas(64) uint8_t order[64], low[128], high[128];
};

constexpr E4M3Tables make_tables() {
  E4M3Tables t{};
  // Unpacking and shifting below scatter the bytes of a vector; they are put first where that brings them into order.
  for (int n = 0; n < 64; ++n) t.order[n / 4 % 4 * 16 + n / 32 * 8 + n % 4 * 2 + n / 16 % 2] = uint8_t(n);
  for (int n = 0; n < 128; ++n) {
    const UInt32 bits = __builtin_bit_cast(UInt32, widen(E4M3{uint8_t(n)}));
    t.low[n] = uint8_t(bits >> 16), t.high[n] = uint8_t(bits >> 24);
  }
  return t;
}
static constexpr E4M3Tables tables = make_tables();

HWY_INLINE bool has_tables() { return __builtin_cpu_supports("avx512vbmi"); }

// By the low 7 bits of each byte.
HWY_INLINE __m512i look_up(const uint8_t* table, __m512i bytes) {
  const __m512i first = _mm512_load_si512(table), second = _mm512_load_si512(table + 64);
  asm("vpermi2b %2, %1, %0" : "+v"(bytes) : "v"(first), "v"(second));
  return bytes;
}

// With the sign of `bytes`.
HWY_INLINE __m512i with_sign(__m512i magnitudes, __m512i bytes) {
  return _mm512_ternarylogic_epi32(magnitudes, bytes, _mm512_set1_epi8(-128), 0xf8);
}

HWY_INLINE void widen_several(const TabledE4M3* p, Vec (&out)[4]) {
  __m512i bytes;
  asm("vpermb %2, %1, %0" : "=v"(bytes) : "v"(_mm512_load_si512(tables.order)), "v"(_mm512_loadu_si512(p)));
  const __m512i low = look_up(tables.low, bytes);
  const __m512i high = with_sign(look_up(tables.high, bytes), bytes);
  const __m512i words[2] = {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
  TESSERA_UNROLL
  for (int n = 0; n < 2; ++n) {
    out[2 * n] = Vec{_mm512_castsi512_ps(_mm512_slli_epi32(words[n], 16))};
    out[2 * n + 1] = Vec{_mm512_castsi512_ps(_mm512_and_si512(words[n], _mm512_set1_epi32(-65536)))};
  }
}
HWY_INLINE Vec widen_vector(const TabledE4M3*) { return hn::Zero(FloatTag()); }  // there is no single vector
#else
HWY_INLINE bool has_tables() { return false; }
#endif

// Of rows of `width` numbers that become f32. Widths that are no whole vectors are widened into scratch, to f32.
HWY_INLINE Reading reading_of(Type type, Int64 width) {
  if (type == Type::f32 || width % lanes != 0) return Reading::f32;
  if (type == Type::f16) return Reading::f16;
  if (type == Type::bf16) return width % pair_width == 0 ? Reading::paired_bf16 : Reading::bf16;
  if (type == Type::i8) return Reading::i8;
  return width % (4 * lanes) == 0 && has_tables() ? Reading::tabled_e4m3 : Reading::e4m3;
}
