// SPDX-License-Identifier: Apache-2.0
// Backward pass of vk_tiled, one text for both sides: a workgroup has 32 queries of a head and sums dQ over its keys,
// or 32 keys of a KV head and sums dK and dV over the queries of its heads. No atomics on sums: the order is fixed.
// Implements docs/algorithm.md, "Backward, tile by tile"; docs/vulkan.md.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "tile.glsl"
#include "tile_pair.glsl"

layout(constant_id = 0) const int V_CHUNKS = 1;   // of dV, 64 dims each; 0: no dV, nor for queries
layout(constant_id = 1) const int QK_CHUNKS = 1;  // of dQ or dK; 0: neither
layout(constant_id = 2) const bool KEYS = false;  // rows are keys
const int V_SIZE = V_CHUNKS > 0 ? V_CHUNKS : 1, QK_SIZE = QK_CHUNKS > 0 ? QK_CHUNKS : 1;

void main() {
  const int D = given.launch.D, Dv = given.launch.Dv;
  Place place;
  const int64_t blocks = given.launch.blocks;
  if (KEYS ? !key_place(given.p.x, blocks, ROWS, place) : !query_place(given.p.x, blocks, ROWS, place)) return;
  const DeviceSequence s = place.s;
  const int64_t row0 = place.first;
  const bool want_v = V_CHUNKS > 0 && KEYS && given.p.dv.data != 0ul;
  const bool want_qk = QK_CHUNKS > 0 && (KEYS ? given.p.dk.data : given.p.dq.data) != 0ul;

  float v_sums[V_SIZE][32], qk_sums[QK_SIZE][32];
  for (int c = 0; c < V_SIZE; ++c) [[unroll]] for (int n = 0; n < 32; ++n) v_sums[c][n] = 0.0;
  for (int c = 0; c < QK_SIZE; ++c) [[unroll]] for (int n = 0; n < 32; ++n) qk_sums[c][n] = 0.0;

  const Range own = Range(row0, lesser(row0 + ROWS, KEYS ? s.nk : s.nq));
  const Range others = KEYS ? visible_queries(s.mask, own) : visible_keys(s.mask, own);
  const int heads = KEYS ? given.p.x.Hq / given.p.x.Hk : 1;
  if (!KEYS) load_query_numbers(given.p, s, place.b, place.h, row0);
  for (int g = 0; g < heads; ++g) {
    const int h = place.h + g;
    const HeadScores head = head_scores(given.p.x, given.launch, place.b, h, given.kind.bias);
    for (int64_t column0 = others.begin / COLS * COLS; column0 < others.end; column0 += COLS) {
      const int64_t i0 = KEYS ? column0 : row0, j0 = KEYS ? row0 : column0;
      if (KEYS) load_query_numbers(given.p, s, place.b, h, i0);
      barrier();
      const Rows q = rows_at(given.p.x.q, place.b, s.q_begin + i0, h, s.nq - i0, D, given.kind.q, true);
      const Rows d_o = rows_at(given.p.d_o, place.b, s.q_begin + i0, h, s.nq - i0, Dv, given.kind.d_o, true);
      const Rows k = rows_at(given.p.x.k, place.b, s.k_begin + j0, place.kv, s.nk - j0, D, given.kind.q, false);
      const Rows v = rows_at(given.p.x.v, place.b, s.k_begin + j0, place.kv, s.nk - j0, Dv, given.kind.q, false);
      float S[16], dP[16];
      if (KEYS) multiply(k, q, S); else multiply(q, k, S);
      [[unroll]] for (int n = 0; n < 16; ++n) dP[n] = 0.0;
      if (want_qk) {
        if (KEYS) multiply(v, d_o, dP); else multiply(d_o, v, dP);
      }
      pair_gradients(given.p, s, head, i0, j0, KEYS, S, dP, false);
      if (want_v)
        for (int c = 0; c < V_CHUNKS; ++c)
          if (c * CHUNK < Dv) add_weighted(d_o, c * CHUNK, v_sums[c]);
      if (want_qk)
        for (int c = 0; c < QK_CHUNKS; ++c)
          if (c * CHUNK < D) {
            if (KEYS) add_gradient(q, c * CHUNK, qk_sums[c]); else add_gradient(k, c * CHUNK, qk_sums[c]);
          }
    }
  }

  const bool accumulate = given.p.accumulate != 0;
  if (want_v) {
    const Rows rows = rows_at(given.p.dv, place.b, s.k_begin + row0, place.kv, s.nk - row0, Dv, given.kind.dv, false);
    for (int c = 0; c < V_CHUNKS; ++c) store_sums(rows, c * CHUNK, v_sums[c], 1.0, accumulate);
  }
  if (want_qk) {
    Rows rows = rows_at(given.p.dq, place.b, s.q_begin + row0, place.h, s.nq - row0, D, given.kind.dq, false);
    if (KEYS) rows = rows_at(given.p.dk, place.b, s.k_begin + row0, place.kv, s.nk - row0, D, given.kind.dk, false);
    for (int c = 0; c < QK_CHUNKS; ++c) store_sums(rows, c * CHUNK, qk_sums[c], given.p.x.scale, accumulate);
  }
}
