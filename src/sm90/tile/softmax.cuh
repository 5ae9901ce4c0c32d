// SPDX-License-Identifier: Apache-2.0
// Softmax of a tile of scores that lies in a warpgroup's accumulators: every thread has two rows, each shared by four
// neighbouring lanes. Device code; implements docs/algorithm.md, "Online softmax", in the max-free form: m only has to
// keep exponentials in range, so after a row's first tile it stays, unless a tile's sum shows that it is too small.
#pragma once

#include "gpu/kernel/lanes.cuh"
#include "math/softmax.hpp"
#include "sm90/config.hpp"
#include "sm90/kernel/work.cuh"
#include "sm90/layout.hpp"
#include "sm90/ptx/math.cuh"

namespace tessera::sm90 {

// A thread's two rows. Value n of an accumulator belongs to row n / 2 % 2.
template <Config config>
struct Rows {
  static constexpr int values = config.block_keys / 2;
  using Scores = float[values];
  using Probabilities = UInt32[values / 2];  // packed: an operand of the next product
  // Beyond this a tile's sum, and so perhaps a P, would leave the type's range.
  static constexpr float limit = config.element == Element::f16 ? 0x1p15f : 0x1p40f;

  float factor;  // of scores: scale log2(e)
  // base: m, or 0 where nothing is seen yet; l: this lane's share. Carried: the row's own, in all of its lanes.
  float base[2] = {0, 0}, l[2] = {0, 0};
  // From which sum on a tile needs its own maximum. Below 0: nothing is seen yet. NaN: the sequence has no such row,
  // which shares a warp with others, but must not decide anything for them.
  float bound[2] = {-1, -1};
  static constexpr float no_row = __builtin_bit_cast(float, 0x7fc00000u);
  float alpha[2] = {1, 1};  // what O must be multiplied by
  bool shifted = false;     // alpha is not 1

  __device__ float m(int r) const { return bound[r] < 0 ? minus_infinity<float> : base[r]; }
  __device__ float sum(int r) const { return config.carried ? l[r] : gpu::quad_sum(l[r]); }

  // exp2(factor S - base), and the sums of this thread's values. `take(n, p)` gets four at a time.
  template <class Take>
  __device__ void exponentials(const Scores& S, float (&sums)[2], Take take) const {
    float part[4] = {};
#pragma unroll
    for (int n = 0; n < values; n += 4) {
      float p[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        p[e] = exp2_of(fmaf(S[n + e], factor, -base[e / 2]));
        part[e] += p[e];
      }
      take(n, p);
    }
    sums[0] = part[0] + part[1], sums[1] = part[2] + part[3];
  }

  // With the tile's own maximum; where rows may be carried, in those whose bits are set.
  template <class Take>
  __device__ void online(const Scores& S, Take take, UInt32 raised = 3) {
    float part[4] = {S[0], S[1], S[2], S[3]}, sums[2];
#pragma unroll
    for (int n = 4; n < values; ++n) part[n % 4] = fmaxf(part[n % 4], S[n]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float before = m(r), tile = gpu::quad_max(fmaxf(part[2 * r], part[2 * r + 1])) * factor;
      const float top = config.carried && !(raised >> r & 1) ? before : fmaxf(before, tile);
      base[r] = exponent_base(top);
      alpha[r] = exp2_of(before - base[r]);
      if (bound[r] < 0 && top != minus_infinity<float>) bound[r] = 0;
    }
    exponentials(S, sums, take);
#pragma unroll
    for (int r = 0; r < 2; ++r) l[r] = fmaf(l[r], alpha[r], config.carried ? gpu::quad_sum(sums[r]) : sums[r]);
    shifted = __any_sync(0xffffffffu, alpha[0] != 1 || alpha[1] != 1);
  }

  // The first tile of a row, and those that `steady` gives up. What four lanes have summed is bound to one lane's sum:
  // where there are few keys, lanes differ more than rows do.
  __device__ void online(const Scores& S, Probabilities& P) {
    online(S, [&](int n, const float(&p)[4]) { pack(P, n, p); });
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float row = gpu::quad_sum(l[r]);
      if (bound[r] >= 0) bound[r] = fminf(limit, row);
    }
  }
  // The same, but P, times `keep(n)`, stays in the scores' place, as f32, until `pack`.
  template <class Keep>
  __device__ void online_in_place(Scores& S, Keep keep) {
    online(S, [&](int n, const float(&p)[4]) {
#pragma unroll
      for (int e = 0; e < 4; ++e) S[n + e] = p[e] * keep(n + e);
    });
  }

  // Without looking for a maximum. The tile is done again with its maximum if its sum is too large: for the type's
  // range, or for exactness: a P that outweighs what its row had summed at the last maximum, and its lane until now,
  // should be 1, which rounding leaves alone. As the bound grows with the lane's sum, this soon becomes rare. It holds
  // up the block, which is then out of step with those that read the same keys (plan_forward).
  __device__ void steady(const Scores& S, Probabilities& P) {
    float sums[2];
    exponentials(S, sums, [&](int n, const float(&p)[4]) { pack(P, n, p); });
    shifted = false;
    if (__any_sync(0xffffffffu, sums[0] >= bound[0] || sums[1] >= bound[1])) {
      online(S, P);
      return;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      l[r] += sums[r];
      if (bound[r] < l[r]) bound[r] = fminf(l[r], limit);
    }
  }

  // --- Rows that may be carried from call to call. What decides about a row's bits is its m and l before a tile, and
  // its own scores: not where the keys are cut into calls, and no other row.

  __device__ void resume(int r, float m, float sum) {
    base[r] = exponent_base(m), l[r] = sum;
    bound[r] = m == minus_infinity<float> ? -1 : fminf(limit, sum);
  }

  // In the place of `steady`, and of a first tile. The row's sum until now is its bound. Rows that have seen nothing
  // need a maximum in any case; where a warp has no others, as before its first tile, that is known beforehand.
  __device__ void carry(const Scores& S, Probabilities& P) {
    const auto take = [&](int n, const float(&p)[4]) { pack(P, n, p); };
    UInt32 raised = 3;
    bool online_tile = !__any_sync(0xffffffffu, bound[0] >= 0 || bound[1] >= 0);
    shifted = false;
    if (!online_tile) {
      float sums[2];
      exponentials(S, sums, take);
      const auto exceeds = [&](int r, float sum) { return bound[r] < 0 || sum >= bound[r]; };
      online_tile = __any_sync(0xffffffffu, exceeds(0, sums[0]) || exceeds(1, sums[1]));
      if (online_tile) {
        raised = UInt32(exceeds(0, gpu::quad_max(sums[0]))) | UInt32(exceeds(1, gpu::quad_max(sums[1]))) << 1;
      } else {
        l[0] += gpu::quad_sum(sums[0]), l[1] += gpu::quad_sum(sums[1]);
      }
    }
    if (online_tile) online(S, take, raised);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (bound[r] >= 0) bound[r] = fminf(limit, l[r]);
  }

  __device__ static void pack(Probabilities& P, int n, const float (&p)[4]) {
    P[n / 2] = packed<config.element>(p[0], p[1]), P[n / 2 + 1] = packed<config.element>(p[2], p[3]);
  }
  __device__ static void pack(Probabilities& P, const Scores& S) {
#pragma unroll
    for (int n = 0; n < values; n += 2) P[n / 2] = packed<config.element>(S[n], S[n + 1]);
  }
};

}  // namespace tessera::sm90
