// SPDX-License-Identifier: Apache-2.0
// The ladder's first rung, forward: one thread per query row, online softmax, K and V read from global memory each
// time. The baseline. Device code; implements docs/algorithm.md, "Online softmax".
#pragma once

#include "ladder/kernel/naive.cuh"
#include "math/compensated.hpp"

namespace tessera::ladder {

template <Config config>
__device__ void naive_forward(const ForwardParams& p) {
  QueryPlace place;
  if (!query_place(p.x, config.threads, place)) return;
  const DeviceSequence& s = place.s;
  const Int64 i = place.first + threadIdx.x;
  if (i >= s.nq) return;

  float q[config.D], O[config.Dv] = {}, m = minus_infinity<float>;
  float l = 0, lost = 0;  // Kahan summation: many equal terms would drift
  const auto* q_row = row_of<config.element>(p.x.q, place.b, s.q_begin + i, place.h);
  for (int d = 0; d < config.D; ++d) q[d] = to_float(q_row[d]);

  const Range keys = visible_keys(s.mask, {i, i + 1}), together = visible_keys(s.mask, rows_of_warp(i, s.nq));
  constexpr Int64 chain = 64;  // longer sums drift when the terms have one sign (docs/numerics.md)
  for (Int64 begin = together.begin; begin < together.end; begin += chain) {
    float part[config.Dv] = {};
    for (Int64 j = begin; j < lesser(begin + chain, together.end); ++j) {
      if (j < keys.begin || j >= keys.end) continue;
      const auto* k = key_row<config.element>(p.x.k, place, j);
      float S = 0;
      for (int d = 0; d < config.D; ++d) S = fmaf(q[d], to_float(k[d]), S);
      S *= p.x.score_scale * log2e<float>;
      if (S > m) {  // a new maximum: rescale what was summed relative to the old one
        const float alpha = exp2f(m - S);
        l *= alpha, lost *= alpha;
        for (int d = 0; d < config.Dv; ++d) O[d] *= alpha, part[d] *= alpha;
        m = S;
      }
      const float P = exp2f(S - exponent_base(m));
      add_compensated(l, lost, P);
      const auto* v = key_row<config.element>(p.x.v, place, j);
      for (int d = 0; d < config.Dv; ++d) part[d] = fmaf(P, to_float(v[d]), part[d]);
    }
    for (int d = 0; d < config.Dv; ++d) O[d] += part[d];
  }

  const float inverse = l == 0 ? 0 : 1 / l;
  auto* o = row_of<config.o>(p.o, place.b, s.q_begin + i, place.h);
  for (int d = 0; d < config.Dv; ++d) from_float(O[d] * inverse, o[d]);
  if (p.lse.data) *number_of(p.lse, place.b, s.q_begin + i, place.h) = natural_lse(m, double(l) - double(lost));
}

}  // namespace tessera::ladder
