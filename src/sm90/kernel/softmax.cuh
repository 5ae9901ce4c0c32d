// Softmax of a tile of scores that lies in a warpgroup's accumulators: every thread has two rows, each shared by four
// neighbouring lanes. Device text; implements docs/algorithm.md, "Online softmax", in the max-free form: m only has to
// keep exponentials in range, so after a row's first tile it stays, unless a tile's sum shows that it is too small.
#pragma once

#include "math/softmax.hpp"
#include "sm90/config.hpp"
#include "sm90/kernel/work.cuh"
#include "sm90/layout.hpp"
#include "sm90/ptx/math.cuh"

namespace tessera::sm90 {

// Over the four lanes that share a row.
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
template <class Number>
__device__ inline Number quad_sum(Number x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// A thread's two rows. Value n of an accumulator belongs to row n / 2 % 2.
template <Config config>
struct Rows {
  static constexpr int values = config.block_keys / 2;
  using Scores = float[values];
  using Probabilities = UInt32[values / 2];  // packed: an operand of the next product
  // Beyond this a tile's sum, and so perhaps a P, would leave the type's range.
  static constexpr float limit = config.element == Element::f16 ? 0x1p15f : 0x1p40f;

  float factor;                                                                // of scores: scale log2(e)
  float m[2] = {minus_infinity<float>, minus_infinity<float>}, l[2] = {0, 0};  // l: this lane's share
  float alpha[2] = {1, 1};                                                     // what O must be multiplied by
  bool shifted = false;                                                        // alpha is not 1

  // P = exp2(factor S - base); sums: of this thread's values.
  __device__ void exponentials(const Scores& S, Probabilities& P, const float (&base)[2], float (&sums)[2]) const {
    float part[4] = {};
#pragma unroll
    for (int n = 0; n < values; n += 4) {
      float p[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        p[e] = exp2_of(fmaf(S[n + e], factor, -base[e / 2]));
        part[e] += p[e];
      }
      P[n / 2] = packed<config.element>(p[0], p[1]), P[n / 2 + 1] = packed<config.element>(p[2], p[3]);
    }
    sums[0] = part[0] + part[1], sums[1] = part[2] + part[3];
  }

  // With the tile's own maximum: the first tile of a row, tiles that the band cuts, and those that `steady` gives up.
  __device__ void online(const Scores& S, Probabilities& P) {
    float part[4] = {S[0], S[1], S[2], S[3]}, base[2], sums[2];
#pragma unroll
    for (int n = 4; n < values; ++n) part[n % 4] = fmaxf(part[n % 4], S[n]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float top = fmaxf(m[r], quad_max(fmaxf(part[2 * r], part[2 * r + 1])) * factor);
      base[r] = exponent_base(top);
      alpha[r] = exp2_of(m[r] - base[r]);
      m[r] = top;
    }
    exponentials(S, P, base, sums);
#pragma unroll
    for (int r = 0; r < 2; ++r) l[r] = l[r] * alpha[r] + sums[r];
    shifted = true;
  }

  // Without looking for a maximum. A row that has seen nothing yet (m = -inf) gives an infinite sum.
  __device__ void steady(const Scores& S, Probabilities& P) {
    float sums[2];
    exponentials(S, P, m, sums);
    shifted = false;
    if (__any_sync(0xffffffffu, !(sums[0] < limit) || !(sums[1] < limit)))
      online(S, P);
    else
      l[0] += sums[0], l[1] += sums[1];
  }
};

// Scores outside the band become -inf. `column`: the tile's first key plus the thread's first column.
template <Config config>
__device__ inline void hide(float (&S)[config.block_keys / 2], const Band<config>& band, Int32 row, Int32 column) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const Int32 first = band.low + row + 8 * r - column;
    const Int32 seen = band.high + row + 8 * r, last = (seen < band.keys ? seen : band.keys - 1) - column;
#pragma unroll
    for (int n = 2 * r; n < config.block_keys / 2; n += 4)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (n / 4 * 8 + e < first || n / 4 * 8 + e > last) S[n + e] = minus_infinity<float>;
  }
}

}  // namespace tessera::sm90
