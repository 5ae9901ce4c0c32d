// SPDX-License-Identifier: Apache-2.0
// The ladder's first rung, backward: one thread per query row for dQ, one thread per key row for dK and dV, every other
// operand read from global memory each time. No atomics, so deterministic. Device code; docs/algorithm.md, "Backward".
#pragma once

#include "ladder/kernel/naive.cuh"

namespace tessera::ladder {

// Unroll factor of loops over a row's elements. Full unrolling lets the compiler keep the row in registers. A row of
// more than 128 elements lives in local memory either way, and full unrolling would only cost seconds of compile time.
__host__ __device__ constexpr int steps_written_out(int elements) { return elements <= 128 ? elements : 16; }

// P_ij and dS_ij from rows in registers (q, scaled, and dO) and rows in memory (k and v), or the other way round.
struct PairGradient {
  float P, dS;
};

template <int D, int Dv, class K, class V>
__device__ inline PairGradient pair_gradient(const float (&q)[D], const K* k, const float (&d_o)[Dv], const V* v,
                                             float lse2, float delta) {
  float S = 0, dP = 0;
#pragma unroll steps_written_out(D)
  for (int d = 0; d < D; ++d) S = fmaf(q[d], to_float(k[d]), S);
#pragma unroll steps_written_out(Dv)
  for (int d = 0; d < Dv; ++d) dP = fmaf(d_o[d], to_float(v[d]), dP);
  const float P = exp2f(S - lse2);
  return {P, P * (dP - delta)};
}

template <Config config>
__device__ void naive_backward_queries(const BackwardParams& p) {
  QueryPlace place;
  if (!query_place(p.x, config.threads, place)) return;
  const DeviceSequence& s = place.s;
  const Int64 i = place.first + threadIdx.x, token = s.q_begin + i;
  if (i >= s.nq) return;

  float q[config.D], d_o[config.Dv], dQ[config.D] = {};
  const auto* q_row = row_of<config.element>(p.x.q, place.b, token, place.h);
  const auto* d_o_row = row_of<config.d_o>(p.d_o, place.b, token, place.h);
#pragma unroll steps_written_out(config.D)
  for (int d = 0; d < config.D; ++d) q[d] = to_float(q_row[d]) * p.x.score_scale * log2e<float>;
#pragma unroll steps_written_out(config.Dv)
  for (int d = 0; d < config.Dv; ++d) d_o[d] = to_float(d_o_row[d]);
  const Int64 at = place.h * p.row_head + place.b * p.row_batch + token;
  const float lse2 = p.lse2[at], delta = p.delta[at];

  const Range keys = lse2 == -minus_infinity<float> ? Range{} : visible_keys(s.mask, {i, i + 1});
  const Range together = visible_keys(s.mask, rows_of_warp(i, s.nq));
  for (Int64 j = together.begin; j < together.end; ++j) {
    if (j < keys.begin || j >= keys.end) continue;
    const auto* k = key_row<config.element>(p.x.k, place, j);
    const auto* v = key_row<config.element>(p.x.v, place, j);
    const float dS = pair_gradient(q, k, d_o, v, lse2, delta).dS;
#pragma unroll steps_written_out(config.D)
    for (int d = 0; d < config.D; ++d) dQ[d] = fmaf(dS, to_float(k[d]), dQ[d]);
  }
  auto* out = row_of<config.dq>(p.dq, place.b, token, place.h);
#pragma unroll steps_written_out(config.D)
  for (int d = 0; d < config.D; ++d) from_float(dQ[d] * p.x.scale, out[d]);
}

template <Config config>
__device__ void naive_backward_keys(const BackwardParams& p) {
  QueryPlace place;
  if (!key_place(p.x, config.threads, place)) return;
  const DeviceSequence& s = place.s;
  const Int64 j = place.first + threadIdx.x, token = s.k_begin + j;
  if (j >= s.nk) return;

  float k[config.D], v[config.Dv], dK[config.D] = {}, dV[config.Dv] = {};
  const auto* k_row = row_of<config.element>(p.x.k, place.b, token, place.kv);
  const auto* v_row = row_of<config.element>(p.x.v, place.b, token, place.kv);
#pragma unroll steps_written_out(config.D)
  for (int d = 0; d < config.D; ++d) k[d] = to_float(k_row[d]) * p.x.score_scale * log2e<float>;
#pragma unroll steps_written_out(config.Dv)
  for (int d = 0; d < config.Dv; ++d) v[d] = to_float(v_row[d]);

  const Range queries = visible_queries(s.mask, {j, j + 1});
  const Range together = visible_queries(s.mask, rows_of_warp(j, s.nk));
  for (Int32 h = place.h; h < place.h + p.x.Hq / p.x.Hk; ++h)
    for (Int64 i = together.begin; i < together.end; ++i) {
      if (i < queries.begin || i >= queries.end) continue;
      const Int64 at = h * p.row_head + place.b * p.row_batch + s.q_begin + i;
      if (p.lse2[at] == -minus_infinity<float>) continue;
      const auto* q = row_of<config.element>(p.x.q, place.b, s.q_begin + i, h);
      const auto* d_o = row_of<config.d_o>(p.d_o, place.b, s.q_begin + i, h);
      const PairGradient g = pair_gradient(k, q, v, d_o, p.lse2[at], p.delta[at]);
#pragma unroll steps_written_out(config.Dv)
      for (int d = 0; d < config.Dv; ++d) dV[d] = fmaf(g.P, to_float(d_o[d]), dV[d]);
#pragma unroll steps_written_out(config.D)
      for (int d = 0; d < config.D; ++d) dK[d] = fmaf(g.dS, to_float(q[d]), dK[d]);
    }
  if (p.dk.data) {
    auto* out = row_of<config.dk>(p.dk, place.b, token, place.kv);
#pragma unroll steps_written_out(config.D)
    for (int d = 0; d < config.D; ++d) from_float(dK[d] * p.x.scale, out[d]);
  }
  if (p.dv.data) {
    auto* out = row_of<config.dv>(p.dv, place.b, token, place.kv);
#pragma unroll steps_written_out(config.Dv)
    for (int d = 0; d < config.Dv; ++d) from_float(dV[d], out[d]);
  }
}

}  // namespace tessera::ladder
