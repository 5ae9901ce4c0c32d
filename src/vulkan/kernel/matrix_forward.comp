// SPDX-License-Identifier: Apache-2.0
// Forward pass of vk_matrix: a workgroup has 64 queries of one head, a subgroup 16 of them, and goes through its keys 32
// at a time with a running maximum and a compensated sum (online softmax). Products by cooperative matrices.
// Implements docs/algorithm.md, "Online softmax"; docs/vulkan.md, "vk_matrix".
#version 460
#extension GL_GOOGLE_include_directive : require
#include "matrix.glsl"

layout(constant_id = 0) const int V_CHUNKS = 1;  // of Dv, 64 each
layout(constant_id = 1) const int D_CHUNKS = 1;  // of D
layout(constant_id = 7) const bool KEPT = true;  // Q stays in registers
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer Parameters { ForwardBlock block; };
layout(push_constant) uniform Push { uint64_t parameters; };
// The block stays in memory, and a number of it is read where it is used: what were read at once would fill registers
// that tiles need.
#define given Parameters(parameters).block

const int QUERIES = (KEPT ? D_CHUNKS : 1) * BANDS * DEPTH, OUTPUTS = V_CHUNKS * BANDS * WIDE;  // matrices
ROW_OPERAND(load_query_chunk, load_queries, multiply_chunk, multiply, D_CHUNKS, QUERIES)
ADD_WEIGHTED(add_weighted, OUTPUTS)
STORE_SUMS(store_sums, V_CHUNKS, OUTPUTS)

const int ALPHA = 16;  // where a row of area 1 has its alpha, behind 32 weights of 16 bits: once for each column

void main() {
  const int D = given.launch.D, Dv = given.launch.Dv, kind = given.kind.q;
  Place place;
  if (!query_place(given.p.x, given.launch.blocks, ROWS, place)) return;
  const DeviceSequence s = place.s;
  const int64_t i0 = place.first;
  const HeadScores head = head_scores(given.p.x, given.launch, place.b, place.h, given.kind.bias);
  const Rows queries = rows_at(given.p.x.q, place.b, s.q_begin + i0, place.h, s.nq - i0, D, kind, false);
  const Range strip = Range(i0 + strip_row(), lesser(i0 + strip_row() + STRIP, s.nq));
  HeadScores plain = head;  // of tiles that have neither a mask nor options
  plain.options = ScoreOptions(false, false, false, false, false);
  const bool has_options = head.options.softcap || head.options.alibi || head.options.bias || head.options.mask;

  float m[OWN_ROWS], l[OWN_ROWS], lost[OWN_ROWS];
  UNROLLED for (int r = 0; r < OWN_ROWS; ++r) m[r] = lowest, l[r] = 0.0, lost[r] = 0.0;
  LeftMatrix kept[QUERIES];
  SumMatrix sums[OUTPUTS];
  UNROLLED for (int n = 0; n < OUTPUTS; ++n) sums[n] = ZERO_SUM;
  load_queries(queries, area(0), kept);

  const Range keys = visible_keys(s.mask, Range(i0, lesser(i0 + ROWS, s.nq)));
  for (int64_t j0 = keys.begin / COLS * COLS; j0 < keys.end; j0 += COLS) {
    const Rows key_rows = rows_at(given.p.x.k, place.b, s.k_begin + j0, place.kv, s.nk - j0, D, kind, false);
    const Rows value_rows = rows_at(given.p.x.v, place.b, s.k_begin + j0, place.kv, s.nk - j0, Dv, kind, false);
    const int visible = tile_class(s.mask, strip, Range(j0, j0 + COLS));
    const bool idle = visible == TileClass_empty;
    SumMatrix S[SCORES];
    multiply(queries, key_rows, idle, area(0), kept, S);

    LeftMatrix weights[WEIGHTS];
    if (!idle) {
      store_scores(S, area(0));
      const TileBand band = band_of(s, i0, j0);
      const bool simple = visible == TileClass_full && !has_options;
      bool stays = true;  // no maximum of these rows is new
      UNROLLED for (int r = 0; r < OWN_ROWS; ++r) {
        const int row = own_row(r), query = strip_row() + row, at = area(0) + row * PITCH;
        float top = m[r], unused = 0.0;
        for (int p = 0; p < OWN_PAIRS; ++p)
          for (int e = 0; e < 2; ++e) {
            const int key = 2 * own_pair(p) + e;
            const float product = uintBitsToFloat(strips[at + key]);
            float score = lowest;
            if (simple)
              score = score_of(given.p.x, s, plain, product, i0 + query, j0 + key, unused);
            else if (sees(band, query, key))
              score = score_of(given.p.x, s, head, product, i0 + query, j0 + key, unused);
            strips[at + key] = floatBitsToUint(score);
            top = max(top, score);
          }
        for (int n = 1; n < LANES_PER_ROW; n *= 2) top = max(top, subgroupShuffleXor(top, n));
        const float alpha = exp2_of(m[r] - top);
        m[r] = top;
        stays = stays && alpha == 1.0;
        float sum = 0.0;
        for (int p = 0; p < OWN_PAIRS; ++p) {
          float P[2];
          UNROLLED for (int e = 0; e < 2; ++e) {
            const int key = 2 * own_pair(p) + e;
            const float score = uintBitsToFloat(strips[at + key]);
            P[e] = score <= hidden ? 0.0 : exp2_of(score - top);
            sum += P[e];
            P[e] *= keep_of(given.p.x, head, i0 + query, j0 + key);
          }
          strips[area(1) + row * PITCH + own_pair(p)] = narrowed(P[0], kind) | (narrowed(P[1], kind) << 16);
        }
        for (int n = 1; n < LANES_PER_ROW; n *= 2) sum += subgroupShuffleXor(sum, n);
        l[r] *= alpha, lost[r] *= alpha;
        add_compensated(l[r], lost[r], sum);
        for (int n = lane() % LANES_PER_ROW; n < N; n += LANES_PER_ROW)
          strips[area(1) + row * PITCH + ALPHA + n] = floatBitsToUint(alpha);
      }
      strip_barrier();
      if (!subgroupAll(stays))
        UNROLLED for (int b = 0; b < BANDS; ++b) {
          SumMatrix alphas;
          LOAD_SUM(alphas, area(1) + b * M * PITCH + ALPHA);
          UNROLLED for (int c = 0; c < V_CHUNKS; ++c)
            UNROLLED for (int n = 0; n < WIDE; ++n)
              sums[(c * BANDS + b) * WIDE + n] = SCALED(sums[(c * BANDS + b) * WIDE + n], alphas);
        }
      load_weights(area(1), weights);
    }
    UNROLLED for (int c = 0; c < V_CHUNKS; ++c)
      if (c * CHUNK < Dv) {
        const int at = stage_columns(value_rows, c * CHUNK);
        if (!idle) add_weighted(weights, at, c, sums);
      }
  }

  strip_barrier();
  UNROLLED for (int r = 0; r < OWN_ROWS; ++r) {
    const int64_t i = i0 + strip_row() + own_row(r);
    const float inverse = finished(given.p.x, place.h, m[r], l[r]);
    strips[area(1) + own_row(r) * PITCH + FACTOR] = floatBitsToUint(inverse);
    if (given.p.lse.data != 0ul && i < s.nq && lane() % LANES_PER_ROW == 0)
      put_lse(number_of(given.p.lse, place.b, s.q_begin + i, place.h), m[r], l[r]);
  }
  store_sums(rows_at(given.p.o, place.b, s.q_begin + i0, place.h, s.nq - i0, Dv, given.kind.o, false), sums, false);
}
