// SPDX-License-Identifier: Apache-2.0
// P and dS of a tile of scores, computed again from Q, K, LSE and delta. Included by the backward kernels of vk_tiled.
// Implements docs/algorithm.md, "Backward, tile by tile".
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer Parameters { BackwardBlock block; };
layout(push_constant) uniform Push { uint64_t parameters; };

int64_t workspace_row(BackwardParams p, int b, int64_t token, int h) {
  return h * p.row_head + b * p.row_batch + token;
}

// LSE and delta of the queries i0 to i0 + 31 into shared memory. A barrier comes first, and must follow.
void load_query_numbers(BackwardParams p, DeviceSequence s, int b, int h, int64_t i0) {
  barrier();
  const int n = invocation();
  if (n >= ROWS) return;
  query_lse[n] = blind, query_delta[n] = 0.0;
  if (i0 + n >= s.nq) return;
  const uint64_t at = uint64_t(workspace_row(p, b, s.q_begin + i0 + n, h)) * 4ul;
  query_lse[n] = float_at(p.lse2 + at), query_delta[n] = float_at(p.delta + at);
}

// From products S = rows . columns^T of Q and K, and dP of dO and V, to P times the dropout factor in `weights` and to dS
// in `gradients`. Everybody must be done with both. A loop, not 16 copies of it: scores have many options.
void pair_gradients(BackwardParams p, DeviceSequence s, HeadScores head, int64_t i0, int64_t j0, bool rows_are_keys,
                    float S[16], float dP[16], bool before_softcap) {
  const TileBand band = band_of(s, i0, j0);
  [[unroll]] for (int n = 0; n < 16; ++n) weights[own_place(n)] = S[n], gradients[own_place(n)] = dP[n];
  [[dont_unroll]] for (int n = 0; n < 16; ++n) {
    const int row = own_row(n / 4), column = own_column(n % 4), at = own_place(n);
    const int query = rows_are_keys ? column : row, key = rows_are_keys ? row : column;
    float P = 0.0, dS = 0.0;
    if (sees(band, query, key) && query_lse[query] < blind) {
      float derivative = 1.0;
      const float score = score_of(p.x, s, head, weights[at], i0 + query, j0 + key, derivative);
      if (!(score <= hidden)) {
        P = exp2_of(score - query_lse[query]);
        const float keep = keep_of(p.x, head, i0 + query, j0 + key);
        dS = P * (keep * gradients[at] - query_delta[query]);
        if (!before_softcap && ScoreOptions_need_derivative(head.options)) dS *= derivative;
        P *= keep;
      }
    }
    weights[at] = P, gradients[at] = dS;
  }
}
