// SPDX-License-Identifier: Apache-2.0
// What the kernels of all families share: elements of any type as f32, addresses of rows, the place of a block.
// Device code: sees math, config and params, nothing else.
#pragma once

#include "gpu/config.hpp"
#include "gpu/kernel/math.cuh"
#include "gpu/params.hpp"
#include "math/softmax.hpp"

namespace tessera::gpu {

template <Element element>
struct Stored;
template <>
struct Stored<Element::f32> {
  using Type = float;
};
template <>
struct Stored<Element::f16> {
  using Type = F16;
};
template <>
struct Stored<Element::bf16> {
  using Type = BF16;
};

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(BF16 x) { return widen(x); }
__device__ inline float to_float(F16 x) { return unpacked<Element::f16>(x.bits); }

__device__ inline void from_float(float x, float& out) { out = x; }
__device__ inline void from_float(float x, F16& out) { out.bits = nearest_f16(x); }
// sm_80 has an instruction for this; the shared text is right everywhere, and outputs are few.
__device__ inline void from_float(float x, BF16& out) { out = narrow<BF16>(x); }

// Row `token` of head h: pointer to its first element.
template <Element element>
__device__ inline auto* row_of(const TokenRef& t, Int64 b, Int64 token, Int64 h) {
  using T = typename Stored<element>::Type;
  return static_cast<T*>(t.data) + b * t.batch + token * t.token + h * t.head;
}

__device__ inline float* number_of(const RowRef& r, Int64 b, Int64 row, Int64 h) {
  return r.data + b * r.batch + h * r.head + row * r.row;
}

// The rows of a block. Heads are numbered fastest, so that heads of a group share K and V in the cache.
struct QueryPlace {
  Int32 b, h, kv;
  Int64 first;
  DeviceSequence s;
};

// Rows of a tile: row r is `distance` elements behind row r - 1. `tensor`: where an asynchronous copy of nothing may
// point to, a constant that takes no register.
template <Element element>
struct TileRows {
  typename Stored<element>::Type *first, *tensor;
  Int64 distance;

  __device__ TileRows(const TokenRef& t, typename Stored<element>::Type* first) :
      first(first), tensor(static_cast<typename Stored<element>::Type*>(t.data)), distance(t.token) {}
};

// Key j of a block's sequence and KV head: its row, and the tile of rows that begins there. Of K, V and their
// gradients. Kernels that read keys by address find them here, so that another layout of keys (pages) has one place to
// live; those that copy tiles by TMA say it in a TilePlace.
template <Element element>
__device__ inline auto* key_row(const TokenRef& t, const QueryPlace& place, Int64 j) {
  return row_of<element>(t, place.b, place.s.k_begin + j, place.kv);
}
template <Element element>
__device__ inline TileRows<element> key_tile(const TokenRef& t, const QueryPlace& place, Int64 j) {
  return {t, key_row<element>(t, place, j)};
}

// The same for query i of head h.
template <Element element>
__device__ inline auto* query_row(const TokenRef& t, const QueryPlace& place, Int64 i, Int32 h) {
  return row_of<element>(t, place.b, place.s.q_begin + i, h);
}
template <Element element>
__device__ inline TileRows<element> query_tile(const TokenRef& t, const QueryPlace& place, Int64 i, Int32 h) {
  return {t, query_row<element>(t, place, i, h)};
}

// Queries: the last rows first, which see the most keys when causal. False: this block has none.
__device__ inline bool query_place(const Question& x, Int64 rows, QueryPlace& place) {
  const Int64 number = gridDim.x - 1 - blockIdx.x;
  place.h = Int32(number % x.Hq);
  place.kv = place.h / (x.Hq / x.Hk);
  const BlockPlace at = place_of(number / x.Hq, rows, x.B, x.Nq, x.cu_seqlens_q);
  place.b = at.b, place.first = at.first;
  place.s = sequence_of(x, at.b);
  return place.first < place.s.nq;
}

// The same for keys and KV heads; the first keys, which the most queries see, come first.
__device__ inline bool key_place(const Question& x, Int64 rows, QueryPlace& place, Int64 number = blockIdx.x) {
  place.kv = Int32(number % x.Hk);
  place.h = place.kv * (x.Hq / x.Hk);
  const BlockPlace at = place_of(number / x.Hk, rows, x.B, x.Nk, x.cu_seqlens_k);
  place.b = at.b, place.first = at.first;
  place.s = sequence_of(x, at.b);
  return place.first < place.s.nk;
}

// The mask inside a tile whose first query and key are i0 and j0: query i sees the keys j with low <= j - i <= high. In
// 32 bits: tiles are small, and what is far beyond them is far enough.
struct Diagonals {
  static constexpr Int64 far = 1 << 20;
  int low, high;
  __device__ Diagonals(const BandMask& mask, Int64 i0, Int64 j0) :
      low(int(clamp(mask.low + i0 - j0, -far, far))), high(int(clamp(mask.high + i0 - j0, -far, far))) {}
};

// LSE from a maximum in units of log2(e) and the sum. In f64: it promises little more than its own rounding.
__device__ inline float natural_lse(float m, double l) {
  return float(log_sum_exp(double(m), l, [](double x) { return log2(x); }) * ln2<double>);
}

// The same, faster: the logarithm of a mantissa is exact enough in f32; what it is added to needs f64.
__device__ inline float natural_lse_by_mantissa(float m, float l) {
  int exponent;
  const float mantissa = frexpf(l, &exponent);
  return float(log_sum_exp(double(m), double(l), [&](double) { return double(exponent) + log2f(mantissa); }) *
               ln2<double>);
}

}  // namespace tessera::gpu
