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
  float even_b[16][16], odd_b[16][16];
  for (int k = 0; k < 16; ++k) {
    BF16 pairs[32];
    __builtin_memcpy(pairs, b.row[k], 64);
    for (int n = 0; n < 16; ++n) even_b[k][n] = widen(pairs[2 * n]), odd_b[k][n] = widen(pairs[2 * n + 1]);
  }
  for (int m = 0; m < 16; ++m) {
    BF16 left[32];
    float even[16] = {}, odd[16] = {}, sum[16];
    __builtin_memcpy(left, a.row[m], 64);
    __builtin_memcpy(sum, c.row[m], 64);
    for (int k = 0; k < 16; ++k)
      for (int n = 0; n < 16; ++n) {
        even[n] += widen(left[2 * k]) * even_b[k][n];
        odd[n] += widen(left[2 * k + 1]) * odd_b[k][n];
      }
    for (int n = 0; n < 16; ++n) sum[n] += even[n] + odd[n];
    __builtin_memcpy(c.row[m], sum, 64);
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
