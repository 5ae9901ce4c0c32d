// SPDX-License-Identifier: Apache-2.0
// Forward pass of vk_tiled: a workgroup has 32 queries of one head, and goes through its keys 32 at a time with a running
// maximum and a compensated sum (online softmax). Implements docs/algorithm.md, "Online softmax"; docs/vulkan.md.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "tile.glsl"

layout(constant_id = 0) const int V_CHUNKS = 1;  // of Dv, 64 each
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer Parameters { ForwardBlock block; };
layout(push_constant) uniform Push { uint64_t parameters; };
// The block stays in memory, and a number of it is read where it is used: what were read at once would fill registers
// that tiles need.
#define given Parameters(parameters).block

void main() {
  const int D = given.launch.D, Dv = given.launch.Dv;
  Place place;
  if (!query_place(given.p.x, given.launch.blocks, ROWS, place)) return;
  const DeviceSequence s = place.s;
  const int64_t i0 = place.first;
  const HeadScores head = head_scores(given.p.x, given.launch, place.b, place.h, given.kind.bias);
  const Rows queries = rows_at(given.p.x.q, place.b, s.q_begin + i0, place.h, s.nq - i0, D, given.kind.q, false);

  float m[4], l[4], lost[4], sums[V_CHUNKS][32];
  [[unroll]] for (int r = 0; r < 4; ++r) m[r] = lowest, l[r] = 0.0, lost[r] = 0.0;
  for (int c = 0; c < V_CHUNKS; ++c) [[unroll]] for (int n = 0; n < 32; ++n) sums[c][n] = 0.0;

  const Range keys = visible_keys(s.mask, Range(i0, lesser(i0 + ROWS, s.nq)));
  const bool once = D <= CHUNK;  // the queries stay where they are
  bool loaded = false;
  for (int64_t j0 = keys.begin / COLS * COLS; j0 < keys.end; j0 += COLS) {
    const Rows key_rows = rows_at(given.p.x.k, place.b, s.k_begin + j0, place.kv, s.nk - j0, D, given.kind.q, false);
    const Rows value_rows = rows_at(given.p.x.v, place.b, s.k_begin + j0, place.kv, s.nk - j0, Dv, given.kind.q, false);
    float S[16];
    multiply(queries, key_rows, loaded, S);
    loaded = once;

    // A loop over the invocation's scores, not 16 copies of it: scores have many options.
    const TileBand band = band_of(s, i0, j0);
    float unused = 0.0;
    [[unroll]] for (int n = 0; n < 16; ++n) weights[own_place(n)] = S[n];
    [[dont_unroll]] for (int n = 0; n < 16; ++n) {
      const int row = own_row(n / 4), column = own_column(n % 4), at = own_place(n);
      float score = lowest;
      if (sees(band, row, column))
        score = score_of(given.p.x, s, head, weights[at], i0 + row, j0 + column, unused);
      weights[at] = score;
    }
    [[unroll]] for (int n = 0; n < 16; ++n) S[n] = weights[own_place(n)];
    [[unroll]] for (int r = 0; r < 4; ++r)
      partial[own_row(r) * 8 + invocation() % 8] = max(max(S[r * 4], S[r * 4 + 1]), max(S[r * 4 + 2], S[r * 4 + 3]));
    barrier();
    float alpha[4];
    [[unroll]] for (int r = 0; r < 4; ++r) {
      float top = m[r];
      [[unroll]] for (int n = 0; n < 8; ++n) top = max(top, partial[own_row(r) * 8 + n]);
      alpha[r] = exp2_of(m[r] - top);
      m[r] = top;
    }
    barrier();
    [[unroll]] for (int r = 0; r < 4; ++r) {
      float sum = 0.0;
      [[unroll]] for (int c = 0; c < 4; ++c) {
        const int n = r * 4 + c;
        S[n] = S[n] <= hidden ? 0.0 : exp2_of(S[n] - m[r]);
        sum += S[n];
      }
      partial[own_row(r) * 8 + invocation() % 8] = sum;
    }
    [[unroll]] for (int n = 0; n < 16; ++n) weights[own_place(n)] = S[n];
    if (head.options.dropout)
      [[dont_unroll]] for (int n = 0; n < 16; ++n)
        weights[own_place(n)] *= keep_of(given.p.x, head, i0 + own_row(n / 4), j0 + own_column(n % 4));
    barrier();
    [[unroll]] for (int r = 0; r < 4; ++r) {
      float sum = 0.0;
      [[unroll]] for (int n = 0; n < 8; ++n) sum += partial[own_row(r) * 8 + n];
      l[r] *= alpha[r], lost[r] *= alpha[r];
      add_compensated(l[r], lost[r], sum);
    }
    for (int c = 0; c < V_CHUNKS; ++c) [[unroll]] for (int n = 0; n < 32; ++n) sums[c][n] *= alpha[n / 8];
    for (int c = 0; c < V_CHUNKS; ++c)
      if (c * CHUNK < Dv) add_weighted(value_rows, c * CHUNK, sums[c]);
  }

  [[unroll]] for (int r = 0; r < 4; ++r) {
    const float inverse = finished(given.p.x, place.h, m[r], l[r]);
    for (int c = 0; c < V_CHUNKS; ++c) [[unroll]] for (int n = 0; n < 8; ++n) sums[c][r * 8 + n] *= inverse;
    const int64_t i = i0 + own_row(r);
    if (given.p.lse.data != 0ul && i < s.nq && invocation() % 8 == 0)
      put_lse(number_of(given.p.lse, place.b, s.q_begin + i, place.h), m[r], l[r]);
  }
  const Rows out_rows = rows_at(given.p.o, place.b, s.q_begin + i0, place.h, s.nq - i0, Dv, given.kind.o, false);
  for (int c = 0; c < V_CHUNKS; ++c) store_sums(out_rows, c * CHUNK, sums[c], 1.0, false);
}
