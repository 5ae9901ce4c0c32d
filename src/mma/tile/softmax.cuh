// SPDX-License-Identifier: Apache-2.0
// Softmax of a tile of scores that lies in a warp's accumulators: 16 queries, of which every thread has two, each
// shared by four neighbouring lanes. Device code; implements docs/algorithm.md, "Online softmax", in the max-free form:
// m only has to keep exponentials in range, so after a row's first tile it stays, unless the tile's sum shows that it
// is too small. Only the rows whose own sums show it are raised: a row's bits do not depend on its neighbours.
#pragma once

#include "gpu/kernel/lanes.cuh"
#include "gpu/kernel/math.cuh"
#include "math/softmax.hpp"
#include "mma/config.hpp"

namespace tessera::mma {

// A thread's two rows. Value n of an accumulator belongs to row n / 2 % 2.
template <Config config>
struct Rows {
  static constexpr int values = config.block_keys / 2;
  using Scores = float[values];
  using Probabilities = UInt32[values / 8][4];  // packed: operands of the next product, 16 keys each
  // Beyond this a tile's sum, and so perhaps a P, would leave the type's range.
  static constexpr float limit = config.element == Element::f16 ? 0x1p15f : 0x1p40f;

  float base[2] = {0, 0}, l[2] = {0, 0};  // base: m, or 0 where nothing is seen yet; l: this lane's share
  float bound[2] = {-1, -1};  // from which sum on a tile needs its own maximum. Below 0: nothing is seen yet

  __device__ float m(int r) const { return bound[r] < 0 ? minus_infinity<float> : base[r]; }

  // A sink is a key with its own score and no value; one lane of a row counts it.
  __device__ void begin_with_sink(float sink, bool counts) {
#pragma unroll
    for (int r = 0; r < 2; ++r) base[r] = sink * log2e<float>, bound[r] = 0, l[r] = counts ? 1 : 0;
  }

  // P = exp2(factor S - base), and the sums of this thread's values before they are multiplied by keep(n).
  template <class Keep>
  __device__ void exponentials(const Scores& S, float factor, float (&sums)[2], Probabilities& P, Keep keep) const {
    float part[4] = {};
#pragma unroll
    for (int n = 0; n < values; n += 4) {
      float p[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        p[e] = gpu::exp2_of(fmaf(S[n + e], factor, -base[e / 2]));
        part[e] += p[e];
        p[e] *= keep(n + e);
      }
      P[n / 8][n / 2 % 4] = gpu::packed<config.element>(p[0], p[1]);
      P[n / 8][n / 2 % 4 + 1] = gpu::packed<config.element>(p[2], p[3]);
    }
    sums[0] = part[0] + part[1], sums[1] = part[2] + part[3];
  }

  // Whether m is too small for one of this thread's shares of its rows: for the type's range, or for exactness: a P
  // that outweighs what its row had summed at the last maximum should be 1, which rounding leaves alone.
  __device__ bool exceeded(const float (&sums)[2]) const { return sums[0] >= bound[0] || sums[1] >= bound[1]; }
  // Bit r: for row r that is so for one of the four lanes.
  __device__ UInt32 find_exceeded(const float (&sums)[2]) const {
    return UInt32(gpu::quad_max(sums[0]) >= bound[0]) | UInt32(gpu::quad_max(sums[1]) >= bound[1]) << 1;
  }
  __device__ void add(const float (&sums)[2]) { l[0] += sums[0], l[1] += sums[1]; }

  // With the tile's own maximum, in the rows whose bits are set. alpha: what O must be multiplied by.
  template <class Keep>
  __device__ void online(const Scores& S, float factor, UInt32 raised, float (&alpha)[2], Probabilities& P, Keep keep) {
    float part[4] = {S[0], S[1], S[2], S[3]}, sums[2];
#pragma unroll
    for (int n = 4; n < values; ++n) part[n % 4] = fmaxf(part[n % 4], S[n]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float before = m(r), tile = gpu::quad_max(fmaxf(part[2 * r], part[2 * r + 1])) * factor;
      const float top = raised >> r & 1 ? fmaxf(before, tile) : before;
      base[r] = exponent_base(top);
      alpha[r] = gpu::exp2_of(before - base[r]);
      if (bound[r] < 0 && top != minus_infinity<float>) bound[r] = 0;
    }
    exponentials(S, factor, sums, P, keep);
    // What four lanes have summed bounds one lane's sum: where there are few keys, lanes differ more than rows do.
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      l[r] = fmaf(l[r], alpha[r], sums[r]);
      const float row = gpu::quad_sum(l[r]);
      if ((raised >> r & 1) && bound[r] >= 0) bound[r] = fminf(limit, row);
    }
  }
};

}  // namespace tessera::mma
