// SPDX-License-Identifier: Apache-2.0
// The matrix unit (AMX): eight tiles of 16 rows of 64 bytes, products of bf16 tiles summed in f32, and the rounding of
// f32 to bf16 that goes with them. Included by cpu/isa/amx.cpp inside its target region; tests/emulated holds the same
// functions in plain C++, so that the kernels' own text runs on processors without the unit.
#pragma once

// On some processors of a shared Xeon, tile instructions that follow each other closely do not overlap:
// four loads and four products took 250 cycles, and 180 with as little as eight instructions of any kind behind each
// (docs/experiments.md; a neighbour on the core's other thread is the likely reason). On the others these cost nothing:
// a product lasts 16 cycles, in which a core passes over 96 of them.
#define TESSERA_REST "\n\tnop\n\tnop\n\tnop\n\tnop\n\tnop\n\tnop\n\tnop\n\tnop"

// Written in assembly: the compiler's own functions for tiles tell it less than it must know about memory.
template <int tile>
HWY_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}
template <int tile>
HWY_INLINE void tile_load(const void* rows, Int64 stride_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" TESSERA_REST ::"r"(rows), "r"(stride_bytes), "i"(tile) : "memory");
}
template <int tile>
HWY_INLINE void tile_store(void* rows, Int64 stride_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" TESSERA_REST ::"r"(rows), "r"(stride_bytes), "i"(tile) : "memory");
}
// c += a b: a holds 16 rows of 32 bf16; row k of b holds the pairs (2k, 2k + 1) of 16 columns.
template <int c, int a, int b>
HWY_INLINE void tile_dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" TESSERA_REST ::"i"(c), "i"(a), "i"(b));
}

#undef TESSERA_REST

// 32 numbers rounded to bf16 (to nearest, ties to even; subnormal ones become 0): 16 of `low`, then 16 of `high`.
HWY_INLINE __m512i bf16_halves(Vec low, Vec high) {
  __m512i halves;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(halves) : "v"(high.raw), "v"(low.raw));
  return halves;
}

// What a thread's tiles look like, as ldtilecfg reads it.
struct alignas(64) TileShapes {
  unsigned char palette = 1, start_row = 0, reserved[14] = {};
  UInt16 row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  unsigned char rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileShapes) == 64);
inline constexpr TileShapes tile_shapes{};

// While one of these lives, its thread may use tiles. Then they are released, so that a context switch need not save
// their state.
class TileSession {
 public:
  TileSession() { asm volatile("ldtilecfg %0" ::"m"(tile_shapes)); }
  ~TileSession() { asm volatile("tilerelease"); }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;
};
