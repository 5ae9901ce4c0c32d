// SPDX-License-Identifier: Apache-2.0
// SIMD vocabulary of the CPU kernels over Google Highway: one vector type, exp2, and rows of any input type as f32.
// Included by cpu/isa/*.cpp inside their target region and namespace; everything here is compiled once per set.
#pragma once

namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using IntTag = hn::ScalableTag<int32_t>;
using Vec = hn::Vec<FloatTag>;
using Lane = hn::Mask<FloatTag>;

inline constexpr Int64 lanes = HWY_LANES(float);
static_assert(block_q % lanes == 0);

HWY_INLINE Vec set(float x) { return hn::Set(FloatTag(), x); }
HWY_INLINE Vec load(const float* p) { return hn::LoadU(FloatTag(), p); }
HWY_INLINE void store(Vec x, float* p) { hn::StoreU(x, FloatTag(), p); }
HWY_INLINE Vec iota(float first) { return hn::Iota(FloatTag(), first); }

inline constexpr float infinity = __builtin_inff();

// How good an exponential has to be: as f32, or only much better than 16 bits.
enum class Exactness { f32, halves };

// 2^f for |f| <= 1/2: relative error 2e-9, or 1e-7 with a term less.
template <Exactness exactness>
HWY_INLINE Vec exp2_fraction(Vec f) {
  if (exactness == Exactness::halves) {
    Vec p = hn::MulAdd(set(0.001326472731307149f), f, set(0.009671512991189957f));
    p = hn::MulAdd(p, f, set(0.05550733581185341f));
    p = hn::MulAdd(p, f, set(0.24022242426872253f));
    p = hn::MulAdd(p, f, set(0.6931470036506653f));
    return hn::MulAdd(p, f, set(1.0f));
  }
  Vec p = hn::MulAdd(set(0.00015353361959569156f), f, set(0.0013398875016719103f));
  p = hn::MulAdd(p, f, set(0.00961843691766262f));
  p = hn::MulAdd(p, f, set(0.055503323674201965f));
  p = hn::MulAdd(p, f, set(0.24022647738456726f));
  p = hn::MulAdd(p, f, set(0.6931471824645996f));
  return hn::MulAdd(p, f, set(1.0f));
}

// 2^x for x <= 127, within 1.5 units in the last place; 0 below -126; NaN stays NaN. x = n + f with |f| <= 1/2.
template <Exactness exactness = Exactness::f32>
HWY_INLINE Vec exp2_bounded(Vec x) {
  const Vec magic = set(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const Vec t = hn::Add(x, magic);
  const Vec whole = hn::Sub(t, magic);
  const Vec p = exp2_fraction<exactness>(hn::Sub(x, whole));
#if HWY_TARGET == HWY_AVX3
  const __mmask16 normal = _mm512_cmp_ps_mask(x.raw, set(-126.0f).raw, _CMP_NLT_UQ);
  return Vec{_mm512_maskz_scalef_ps(normal, p.raw, whole.raw)};
#else
  // The low bits of t are n; moving them to the exponent field drops the rest of t.
  const auto n = hn::Add(hn::BitCast(IntTag(), t), hn::Set(IntTag(), 127));
  const Vec power = hn::BitCast(FloatTag(), hn::ShiftLeft<23>(n));
  return hn::IfThenElse(hn::Lt(x, set(-126.0f)), hn::Zero(FloatTag()), hn::Mul(p, power));
#endif
}

// 2^x for any x.
template <Exactness exactness = Exactness::f32>
HWY_INLINE Vec exp2_any(Vec x) {
  return hn::IfThenElse(hn::Gt(x, set(127.0f)), set(infinity), exp2_bounded<exactness>(x));
}

// A function, not a lambda, which target regions do not reach; and no inline one: it is called from outside of them.
HWY_NOINLINE double log2_of(double x) { return __builtin_log2(x); }

// --- rows of any type as f32

// `lanes` 16-bit values, each in the low half of a 32-bit lane.
HWY_INLINE hn::Vec<IntTag> load_halves(const UInt16* p) {
  const hn::Rebind<uint16_t, IntTag> halves;
  return hn::PromoteTo(IntTag(), hn::LoadU(halves, p));
}

HWY_INLINE Vec widen_vector(const BF16* p) { return hn::BitCast(FloatTag(), hn::ShiftLeft<16>(load_halves(&p->bits))); }

// The steps of widen(F16) in math/types.hpp, or one instruction.
HWY_INLINE Vec widen_vector(const F16* p) {
#if HWY_TARGET == HWY_AVX3
  return Vec{_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
#elif HWY_TARGET == HWY_AVX2
  return Vec{_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
#else
  const auto bits = load_halves(&p->bits);
  const auto magnitude = hn::And(bits, hn::Set(IntTag(), 0x7fff));
  const auto sign = hn::ShiftLeft<16>(hn::Xor(bits, magnitude));
  const auto shifted = hn::ShiftLeft<13>(magnitude);
  const auto value = hn::BitCast(IntTag(), hn::Mul(hn::BitCast(FloatTag(), shifted), set(0x1p112f)));
  const auto special = hn::Or(shifted, hn::Set(IntTag(), 0x7f800000));
  const auto result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(IntTag(), 0x7bff)), special, value);
  return hn::BitCast(FloatTag(), hn::Or(result, sign));
#endif
}

HWY_INLINE Vec widen_vector(const float* p) { return load(p); }

// `lanes` bytes, each with its sign in a 32-bit lane.
HWY_INLINE hn::Vec<IntTag> load_bytes(const void* p) {
  const hn::Rebind<int8_t, IntTag> bytes;
  return hn::PromoteTo(IntTag(), hn::LoadU(bytes, static_cast<const int8_t*>(p)));
}

HWY_INLINE Vec widen_vector(const Int8* p) { return hn::ConvertTo(FloatTag(), load_bytes(p)); }

// The steps of widen(E4M3) in math/types.hpp.
HWY_INLINE Vec widen_vector(const E4M3* p) {
  const auto bits = load_bytes(p), largest = hn::Set(IntTag(), 0x7f);
  const auto shifted = hn::AndNot(hn::Set(IntTag(), 0x78000000), hn::ShiftLeft<20>(bits));  // the sign is in five bits
  const Vec value = hn::Mul(hn::BitCast(FloatTag(), shifted), set(0x1p120f));
  const auto is_nan = hn::RebindMask(FloatTag(), hn::Eq(hn::And(bits, largest), largest));
  return hn::IfThenElse(is_nan, set(__builtin_nanf("")), value);
}

// out[0..width) = source[0..width) * factor
template <class T>
HWY_INLINE void widen_row_of(const T* source, Int64 width, float factor, float* out) {
  Int64 d = 0;
  for (; d + lanes <= width; d += lanes) store(hn::Mul(widen_vector(source + d), set(factor)), out + d);
  for (; d < width; ++d) out[d] = widen(source[d]) * factor;
}

// out[0..width) = the numbers of any type at `row`, times factor
HWY_INLINE void widen_numbers(Type type, const char* row, Int64 width, float factor, float* out) {
  if (type == Type::f32) widen_row_of(reinterpret_cast<const float*>(row), width, factor, out);
  if (type == Type::f16) widen_row_of(reinterpret_cast<const F16*>(row), width, factor, out);
  if (type == Type::bf16) widen_row_of(reinterpret_cast<const BF16*>(row), width, factor, out);
  if (type == Type::e4m3) widen_row_of(reinterpret_cast<const E4M3*>(row), width, factor, out);
  if (type == Type::i8) widen_row_of(reinterpret_cast<const Int8*>(row), width, factor, out);
}

// Row i of Rows, or of keys.
template <class Source>
HWY_INLINE void widen_row(const Source& source, Int64 i, Int64 width, float factor, float* out) {
  widen_numbers(source.type, source.row(i), width, factor, out);
}

// The steps of narrow<BF16> and narrow<F16> in math/types.hpp; the result is in the low half of each lane.
HWY_INLINE hn::Vec<IntTag> narrow_bits(Vec x, BF16) {
  const hn::ScalableTag<uint32_t> words;
  const auto bits = hn::BitCast(words, x);
  const auto high = hn::ShiftRight<16>(bits);
  const auto carry = hn::Add(hn::And(high, hn::Set(words, 1)), hn::Set(words, 0x7fff));
  const auto rounded = hn::BitCast(IntTag(), hn::ShiftRight<16>(hn::Add(bits, carry)));
  const auto quiet = hn::BitCast(IntTag(), hn::Or(high, hn::Set(words, 0x40)));
  return hn::IfThenElse(hn::RebindMask(IntTag(), hn::IsNaN(x)), quiet, rounded);
}

HWY_INLINE hn::Vec<IntTag> narrow_bits(Vec x, F16) {
  const IntTag words;
  const auto bits = hn::BitCast(words, x);
  const auto magnitude = hn::And(bits, hn::Set(words, 0x7fffffff));
  const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(words, 0x8000));
  const auto carry = hn::Add(hn::And(hn::ShiftRight<13>(magnitude), hn::Set(words, 1)), hn::Set(words, 0xfff));
  const auto normal = hn::ShiftRight<13>(hn::Sub(hn::Add(magnitude, carry), hn::Set(words, 0x38000000)));
  const auto shifted = hn::BitCast(words, hn::Add(hn::BitCast(FloatTag(), magnitude), set(0.5f)));
  const auto subnormal = hn::Sub(shifted, hn::Set(words, 0x3f000000));
  auto result = hn::IfThenElse(hn::Lt(magnitude, hn::Set(words, 0x38800000)), subnormal, normal);
  result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(words, 0x477fefff)), hn::Set(words, 0x7c00), result);
  result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(words, 0x7f800000)), hn::Set(words, 0x7e00), result);
  return hn::Or(result, sign);
}

template <class T>
HWY_INLINE void narrow_row_of(const float* values, Int64 width, T* out) {
  const hn::Rebind<uint16_t, IntTag> halves;
  Int64 d = 0;
  for (; d + lanes <= width; d += lanes)
    hn::StoreU(hn::DemoteTo(halves, narrow_bits(load(values + d), T())), halves, &out[d].bits);
  for (; d < width; ++d) out[d] = narrow<T>(values[d]);
}

// Row i of an output becomes (or, accumulating, which only f32 does, grows by) values[0..width), rounded to its type.
HWY_INLINE void narrow_row(const Rows& rows, Int64 i, Int64 width, bool accumulate, const float* values) {
  char* row = rows.row(i);
  if (rows.type == Type::f16) narrow_row_of(values, width, reinterpret_cast<F16*>(row));
  if (rows.type == Type::bf16) narrow_row_of(values, width, reinterpret_cast<BF16*>(row));
  if (rows.type != Type::f32) return;
  float* out = reinterpret_cast<float*>(row);
  for (Int64 d = 0; d < width; ++d) out[d] = accumulate ? out[d] + values[d] : values[d];
}

// --- transposition

#if HWY_TARGET == HWY_AVX3
// out[k] = {in[0][k], in[1][k], ..., in[15][k]}: a square of 16 x 16 words, transposed.
HWY_INLINE void transpose_words(__m512i (&x)[16], UInt32* out, Int64 stride) {
  __m512i y[16];
  TESSERA_UNROLL
  for (int n = 0; n < 16; n += 2) {
    y[n] = _mm512_unpacklo_epi32(x[n], x[n + 1]);
    y[n + 1] = _mm512_unpackhi_epi32(x[n], x[n + 1]);
  }
  TESSERA_UNROLL
  for (int n = 0; n < 16; n += 4)
    for (int m = 0; m < 2; ++m) {
      x[n + 2 * m] = _mm512_unpacklo_epi64(y[n + m], y[n + 2 + m]);
      x[n + 2 * m + 1] = _mm512_unpackhi_epi64(y[n + m], y[n + 2 + m]);
    }
  // x[4 q + c] holds columns c, c + 4, c + 8, c + 12 of rows 4 q .. 4 q + 3, a 128-bit block each.
  TESSERA_UNROLL
  for (int c = 0; c < 4; ++c) {
    const __m512i low_even = _mm512_shuffle_i32x4(x[c], x[4 + c], 0x88),
                  low_odd = _mm512_shuffle_i32x4(x[c], x[4 + c], 0xdd);
    const __m512i high_even = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0x88);
    const __m512i high_odd = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0xdd);
    _mm512_storeu_si512(out + c * stride, _mm512_shuffle_i32x4(low_even, high_even, 0x88));
    _mm512_storeu_si512(out + (c + 4) * stride, _mm512_shuffle_i32x4(low_odd, high_odd, 0x88));
    _mm512_storeu_si512(out + (c + 8) * stride, _mm512_shuffle_i32x4(low_even, high_even, 0xdd));
    _mm512_storeu_si512(out + (c + 12) * stride, _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd));
  }
}
#endif
