// From one product q.k to a score, and the dropout factor: softcap, ALiBi, bias, mask, each only if configured. The
// same order and the same mask text as on the CPU. Device text; implements docs/algorithm.md, "Scores" and "Dropout".
#pragma once

#include "simt/kernel/common.cuh"

namespace tessera::simt {

// What one head's scores depend on besides q and k.
template <Config config>
struct ScoreOf {
  const Question& x;
  const DeviceSequence& s;
  Int32 b, h;
  float slope = 0;  // times log2e
  PhiloxKey key{};

  __device__ ScoreOf(const Question& x, const DeviceSequence& s, Int32 b, Int32 h) : x(x), s(s), b(b), h(h) {
    if constexpr (config.alibi) slope = x.slopes[b * x.slope_batch + h * x.slope_head] * log2e;
    if constexpr (config.dropout) key = x.rng ? dropout_key(UInt64(x.rng[0]), UInt64(x.rng[x.rng_stride])) : x.key;
  }

  // What q is multiplied by on loading: products then come out in units of log2(e), or of the softcap.
  __device__ float q_factor() const { return config.softcap ? x.scale / x.softcap : x.scale * log2e; }

  // `masked`: this tile needs the band. derivative: of the softcap, for the backward pass.
  __device__ float operator()(float product, Int64 i, Int64 j, bool masked, float* derivative = nullptr) const {
    float S = product;
    if constexpr (config.softcap) {
      const float t = tanhf(product);
      S = x.softcap * log2e * t;
      if (derivative) *derivative = 1 - t * t;
    }
    if constexpr (config.alibi) S -= slope * fabsf(float(j - i - s.shift));
    if (masked && !s.mask.visible(i, j)) return minus_infinity<float>;
    if (i >= s.nq || j >= s.nk) return minus_infinity<float>;  // beyond memory: bias and mask must not be read
    if constexpr (config.bias != Element::none) {
      using T = typename Stored<config.bias>::Type;
      S += to_float(static_cast<const T*>(x.bias.data)[pair_index(x.bias, i, j)]) * log2e;
    }
    if constexpr (config.mask)
      if (static_cast<const unsigned char*>(x.mask.data)[pair_index(x.mask, i, j)] == 0) return minus_infinity<float>;
    return S;
  }

  // z / (1 - p_drop)
  __device__ float keep(Int64 i, Int64 j) const {
    if constexpr (!config.dropout) return 1;
    const Int64 row = i + x.row0, col = j + x.col0;
    const Philox4 block = dropout_block(key, b + x.batch0, h + x.head0, row, col);
    return dropout_value(block, row, col) >= x.dropout_threshold ? x.keep_scale : 0;
  }

 private:
  __device__ Int64 pair_index(const PairRef& t, Int64 i, Int64 j) const {
    return b * t.batch + h * t.head + i * t.row + j * t.key;
  }
};

}  // namespace tessera::simt
