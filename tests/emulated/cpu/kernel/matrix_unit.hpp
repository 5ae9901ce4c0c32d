// SPDX-License-Identifier: Apache-2.0
// The matrix unit in plain C++, in the order and rounding of the processor's: takes the place of
// src/cpu/kernel/matrix_unit.hpp when amx_emulated_test compiles src/cpu/isa/amx.cpp.
// tdpbf16ps sums even and odd places in chains of their own, adds the two and then the old value; subnormals count as
// 0.
#pragma once

struct alignas(64) EmulatedTile {
  unsigned char row[16][64];
};
inline thread_local EmulatedTile emulated_tiles[8];
inline thread_local bool emulated_session = false;

HWY_INLINE void require_session() {
  if (!emulated_session) __builtin_trap();  // the processor faults as well
}

template <int tile>
HWY_INLINE void tile_zero() {
  require_session();
  emulated_tiles[tile] = {};
}
template <int tile>
HWY_INLINE void tile_load(const void* rows, Int64 stride_bytes) {
  require_session();
  for (Int64 r = 0; r < 16; ++r)
    __builtin_memcpy(emulated_tiles[tile].row[r], static_cast<const char*>(rows) + r * stride_bytes, 64);
}
template <int tile>
HWY_INLINE void tile_store(void* rows, Int64 stride_bytes) {
  require_session();
  for (Int64 r = 0; r < 16; ++r)
    __builtin_memcpy(static_cast<char*>(rows) + r * stride_bytes, emulated_tiles[tile].row[r], 64);
}

// A product of two bf16 is exact in f32, so multiplying and then adding rounds as a fused multiply-add does.
HWY_NOINLINE void emulated_dot(EmulatedTile& c, const EmulatedTile& a, const EmulatedTile& b) {
  static_assert(lanes == 16);  // a row of c
  Vec even_b[16], odd_b[16];
  for (int k = 0; k < 16; ++k) {
    const auto pairs = hn::Load(IntTag(), reinterpret_cast<const int32_t*>(b.row[k]));
    even_b[k] = hn::BitCast(FloatTag(), hn::ShiftLeft<16>(pairs));
    odd_b[k] = hn::BitCast(FloatTag(), hn::And(pairs, hn::Set(IntTag(), -65536)));
  }
  for (int m = 0; m < 16; ++m) {
    BF16 left[32];
    __builtin_memcpy(left, a.row[m], 64);
    Vec even = hn::Zero(FloatTag()), odd = hn::Zero(FloatTag());
    for (int k = 0; k < 16; ++k) {
      even = hn::MulAdd(set(widen(left[2 * k])), even_b[k], even);
      odd = hn::MulAdd(set(widen(left[2 * k + 1])), odd_b[k], odd);
    }
    float* sum = reinterpret_cast<float*>(c.row[m]);
    store(hn::Add(load(sum), hn::Add(even, odd)), sum);
  }
}

template <int c, int a, int b>
HWY_INLINE void tile_dot() {
  require_session();
  const unsigned int before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);  // subnormal operands and results are 0
  emulated_dot(emulated_tiles[c], emulated_tiles[a], emulated_tiles[b]);
  _mm_setcsr(before);
}

HWY_INLINE __m256i emulated_bf16(Vec x) {
  const Vec normal = hn::IfThenZeroElse(hn::Lt(hn::Abs(x), set(0x1p-126f)), x);
  return _mm512_cvtepi32_epi16(narrow_bits(normal, BF16{}).raw);
}
HWY_INLINE __m512i bf16_halves(Vec low, Vec high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(emulated_bf16(low)), emulated_bf16(high), 1);
}

class TileSession {
 public:
  TileSession() {
    emulated_session = true;
    for (EmulatedTile& tile : emulated_tiles) tile = {};
  }
  ~TileSession() { emulated_session = false; }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;
};
