// SPDX-License-Identifier: Apache-2.0
// Forward pass of vk_tiled: a workgroup has 32, 64 or 128 queries of one head, and goes through its keys 32 or 64 at a
// time with a running maximum and a compensated sum (online softmax). The tile is made of constants: an invocation has
// OWN rows by four columns of the scores, and ROW_THREADS x COLUMN_THREADS of them a tile.
// Implements docs/algorithm.md, "Online softmax"; docs/vulkan.md, "Rungs".
#version 460
#extension GL_GOOGLE_include_directive : require
#include "tile.glsl"

layout(constant_id = 0) const int V_CHUNKS = 1;  // of Dv, CHUNK each
// What a row's invocations have of its maximum and its sum lies in the place of values.
#define VALUE_WORD(at) values[(at) >> 2][(at) & 3]

layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer Parameters { ForwardBlock block; };
layout(push_constant) uniform Push { uint64_t parameters; };
// The block stays in memory, and a number of it is read where it is used: what were read at once would fill registers
// that tiles need.
#define given Parameters(parameters).block

// Both are loops over the invocation's scores, not copies of them: scores have many options.
void apply_options(HeadScores head, DeviceSequence s, int64_t i0, int64_t j0) {
  const TileBand band = band_of(s, i0, j0);
  [[dont_unroll]] for (int n = 0; n < SCORES; ++n) {
    const int row = own_row(n / 4), column = own_column(n % 4), at = own_place(n);
    float score = lowest, unused = 0.0;
    if (sees(band, row, column))
      score = score_of(given.p.x, s, head, TILE_WORD(at), i0 + row, j0 + column, unused);
    TILE_WORD(at) = score;
  }
}
void apply_dropout(HeadScores head, int64_t i0, int64_t j0) {
  [[dont_unroll]] for (int n = 0; n < SCORES; ++n)
    TILE_WORD(own_place(n)) *= keep_of(given.p.x, head, i0 + own_row(n / 4), j0 + own_column(n % 4));
}

// --- of a row's invocations

// What each of them has, one after another in `values`. Barriers around it are the caller's.
void put_shares(inout float share[OWN]) {
  [[unroll]] for (int r = 0; r < OWN; ++r) VALUE_WORD(own_row(r) * COLUMN_THREADS + column_thread()) = share[r];
}

void main() {
  const int D = given.launch.D, Dv = given.launch.Dv, kind = PLAIN ? 0 : given.kind.q;
  Place place;
  if (!query_place(given.p.x, given.launch.blocks, ROWS, place)) return;
  const DeviceSequence s = place.s;
  const int64_t i0 = place.first;
  const HeadScores head = head_of(given.p.x, given.launch, place.b, place.h, given.kind.bias);
  const Rows queries = rows_at(given.p.x.q, place.b, s.q_begin + i0, place.h, s.nq - i0, D, kind, false);
  const Range own = Range(i0, lesser(i0 + ROWS, s.nq));
  const bool has_options = head.options.softcap || head.options.alibi || head.options.bias || head.options.mask;

  float m[OWN], l[OWN], lost[OWN], sums[V_CHUNKS][SUMS];
  [[unroll]] for (int r = 0; r < OWN; ++r) m[r] = lowest, l[r] = 0.0, lost[r] = 0.0;
  [[unroll]] for (int c = 0; c < V_CHUNKS; ++c) [[unroll]] for (int n = 0; n < SUMS; ++n) sums[c][n] = 0.0;

  const Range keys = visible_keys(s.mask, own);
  const int64_t first = keys.begin / COLS * COLS;
  const bool stay = STAY && D <= DEPTH;  // the queries stay where they are
  Rows key_rows = rows_at(given.p.x.k, place.b, s.k_begin + first, place.kv, s.nk - first, D, kind, false);
  Rows value_rows = rows_at(given.p.x.v, place.b, s.k_begin + first, place.kv, s.nk - first, Dv, kind, false);
  read_rows(queries, 0, 0);
  read_columns(key_rows, 0, 0);
  bool loaded = false;
  for (int64_t j0 = first; j0 < keys.end; j0 += COLS) {
    float S[SCORES];
    [[unroll]] for (int n = 0; n < SCORES; ++n) S[n] = 0.0;
    for (int d0 = 0; d0 < D; d0 += DEPTH) {
      barrier();  // everybody is done with what was there
      put_operands(queries, loaded, key_rows, d0);
      loaded = stay;
      if (d0 + DEPTH < D) {
        read_rows(queries, 0, d0 + DEPTH);
        read_columns(key_rows, 0, d0 + DEPTH);
      } else {
        read_values(value_rows, 0, 0);
      }
      barrier();
      multiply(D - d0, S);
    }
    advance(key_rows, s.nk - j0 - COLS);

    if (!has_options && tile_class(s.mask, own, Range(j0, j0 + COLS)) == TileClass_full) {
      [[unroll]] for (int n = 0; n < SCORES; ++n) S[n] *= head.numbers.factor;
    } else {
      barrier();  // everybody is done with the operands, whose place weights take
      [[unroll]] for (int n = 0; n < SCORES; ++n) TILE_WORD(own_place(n)) = S[n];
      apply_options(head, s, i0, j0);
      [[unroll]] for (int n = 0; n < SCORES; ++n) S[n] = TILE_WORD(own_place(n));
    }
    float share[OWN];
    [[unroll]] for (int r = 0; r < OWN; ++r)
      share[r] = max(max(S[r * 4], S[r * 4 + 1]), max(S[r * 4 + 2], S[r * 4 + 3]));
    put_shares(share);
    barrier();  // shares are there, and everybody is done with the operands
    [[unroll]] for (int r = 0; r < OWN; ++r) {
      vec4 tops = vec4(m[r]);
      [[unroll]] for (int n = 0; n < COLUMN_THREADS / 4; ++n)
        tops = max(tops, values[own_row(r) * (COLUMN_THREADS / 4) + n]);
      const float top = max(max(tops.x, tops.y), max(tops.z, tops.w));
      const float base = top <= hidden ? 0.0 : top;  // so that what is hidden is 0, also where all is
      const float alpha = exp2_of(m[r] - base);
      m[r] = top;
      float sum = 0.0;
      [[unroll]] for (int c = 0; c < 4; ++c) {
        const int n = r * 4 + c;
        S[n] = exp2_of(S[n] - base);
        sum += S[n];
      }
      l[r] *= alpha, lost[r] *= alpha;
      add_compensated(l[r], lost[r], sum);
      [[unroll]] for (int c = 0; c < V_CHUNKS; ++c)
        [[unroll]] for (int n = 0; n < OWN_QUADS * 4; ++n) sums[c][r * OWN_QUADS * 4 + n] *= alpha;
    }
    put_weights(S);
    if (head.options.dropout) apply_dropout(head, i0, j0);

    [[unroll]] for (int c = 0; c < V_CHUNKS; ++c)
      if (c * CHUNK < Dv) {
        float part[SUMS];
        [[unroll]] for (int n = 0; n < SUMS; ++n) part[n] = 0.0;
        for (int key0 = 0; key0 < COLS; key0 += VALUES) {
          barrier();
          put_values(value_rows, key0, c * CHUNK);
          if (key0 + VALUES < COLS) {
            read_values(value_rows, key0 + VALUES, c * CHUNK);
          } else if ((c + 1) * CHUNK < Dv) {
            read_values(value_rows, 0, (c + 1) * CHUNK);
          } else {
            if (!stay) read_rows(queries, 0, 0);
            read_columns(key_rows, 0, 0);
          }
          barrier();
          add_weighted(key0, part);
        }
        [[unroll]] for (int n = 0; n < SUMS; ++n) sums[c][n] += part[n];
      }
    advance(value_rows, s.nk - j0 - COLS);
  }

  barrier();
  put_shares(l);
  barrier();
  [[unroll]] for (int r = 0; r < OWN; ++r) {
    vec4 parts = vec4(0);
    [[unroll]] for (int n = 0; n < COLUMN_THREADS / 4; ++n) parts += values[own_row(r) * (COLUMN_THREADS / 4) + n];
    float all = (parts.x + parts.y) + (parts.z + parts.w);
    const float inverse = finished(given.p.x, place.h, m[r], all);
    [[unroll]] for (int c = 0; c < V_CHUNKS; ++c)
      [[unroll]] for (int n = 0; n < OWN_QUADS * 4; ++n) sums[c][r * OWN_QUADS * 4 + n] *= inverse;
    const int64_t i = i0 + own_row(r);
    if (given.p.lse.data != 0ul && i < s.nq && column_thread() == 0)
      put_lse(number_of(given.p.lse, place.b, s.q_begin + i, place.h), m[r], all);
  }
  const Rows out_rows = rows_at(given.p.o, place.b, s.q_begin + i0, place.h, s.nq - i0, Dv, given.kind.o, false);
  [[unroll]] for (int c = 0; c < V_CHUNKS; ++c) store_sums(out_rows, c * CHUNK, sums[c], 1.0, false);
}
