// SPDX-License-Identifier: Apache-2.0
// P and dS of a pair, computed again from its products, LSE and delta. Included by the backward kernels of vk_tiled and
// vk_matrix. Implements docs/algorithm.md, "Backward, tile by tile".
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer Parameters { BackwardBlock block; };
layout(push_constant) uniform Push { uint64_t parameters; };
// The block stays in memory, and a number of it is read where it is used: what were read at once would fill registers
// that tiles need.
#define given Parameters(parameters).block

int64_t workspace_row(BackwardParams p, int b, int64_t token, int h) {
  return h * p.row_head + b * p.row_batch + token;
}

// LSE and delta of the queries from i0 on into shared memory, as many as a tile has. A barrier comes first, and must
// follow.
void load_query_numbers(BackwardParams p, DeviceSequence s, int b, int h, int64_t i0) {
  barrier();
  for (int n = invocation(); n < ROWS; n += THREADS) {
    query_lse[n] = blind, query_delta[n] = 0.0;
    if (i0 + n >= s.nq) continue;
    const uint64_t at = uint64_t(workspace_row(p, b, s.q_begin + i0 + n, h)) * 4ul;
    query_lse[n] = float_at(p.lse2 + at), query_delta[n] = float_at(p.delta + at);
  }
}

// Those of a tile's columns, if these are queries: on their way, and there. Barriers are the caller's.
float lse_ahead, delta_ahead;
void read_numbers(BackwardParams p, DeviceSequence s, int b, int h, int64_t i0) {
  lse_ahead = blind, delta_ahead = 0.0;
  if (invocation() >= COLS || i0 + invocation() >= s.nq) return;
  const uint64_t at = uint64_t(workspace_row(p, b, s.q_begin + i0 + invocation(), h)) * 4ul;
  lse_ahead = float_at(p.lse2 + at), delta_ahead = float_at(p.delta + at);
}
void put_numbers() {
  if (invocation() < COLS) query_lse[invocation()] = lse_ahead, query_delta[invocation()] = delta_ahead;
}

// P times the dropout factor, and dS, of a pair that may be outside of the band, from its products: S of q and k, dP of
// dO and v.
void pair_gradient(BackwardParams p, DeviceSequence s, HeadScores head, TileBand band, int64_t i0, int64_t j0, int query,
                   int key, float S, float dP, bool before_softcap, out float P, out float dS) {
  P = 0.0, dS = 0.0;
  if (!sees(band, query, key) || !(query_lse[query] < blind)) return;
  float derivative = 1.0;
  const float score = score_of(p.x, s, head, S, i0 + query, j0 + key, derivative);
  if (score <= hidden) return;
  P = exp2_of(score - query_lse[query]);
  const float keep = keep_of(p.x, head, i0 + query, j0 + key);
  dS = P * (keep * dP - query_delta[query]);
  if (!before_softcap && ScoreOptions_need_derivative(head.options)) dS *= derivative;
  P *= keep;
}
