// SPDX-License-Identifier: Apache-2.0
// Forward pass of vk_matrix: a workgroup has 128 queries of one head, a subgroup 16 of them, and goes through its keys 32
// or 64 at a time with a running maximum and a compensated sum (online softmax). Products by cooperative matrices.
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
ROW_OPERAND(load_query_chunk, load_queries, multiply_chunk, D_CHUNKS, QUERIES)
ADD_WEIGHTED(add_weighted, OUTPUTS)
STORE_SUMS(store_sums, V_CHUNKS, OUTPUTS)

const int OWN = OWN_ROWS * QUADS;  // quads of scores

// Bits of a weight: not negative, and finite but for NaN, which the row's sum keeps. As narrowed(), without its cases.
uint weight_bits(float x) {
  const uint bits = floatBitsToUint(x);
  if (OPERANDS == 2) return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint small = floatBitsToUint(x + 0.5) - 0x3f000000u;
  const uint large = (bits + 0xfffu + ((bits >> 13) & 1u) - 0x38000000u) >> 13;
  return (x < 6.103515625e-05 ? small : large) & 0xffffu;
}
uvec2 four_weights(vec4 x) {
  return uvec2(weight_bits(x.x) | (weight_bits(x.y) << 16), weight_bits(x.z) | (weight_bits(x.w) << 16));
}

// The loops over options and dropout go through the invocation's own words of shared memory, half a tile at a time: one
// copy of the text.
void apply_options(HeadScores head, DeviceSequence s, TileBand band, int half_tile, int64_t i0, int64_t j0) {
  for (int n = 0; n < OWN_ROWS * HALF_QUADS * 4; ++n) {
    const int r = n / (HALF_QUADS * 4), e = n % (HALF_QUADS * 4), at = own_quads(r) * 4 + e;
    const int query = strip_row() + own_row(r), key = own_key(half_tile * HALF_QUADS * 4 + e);
    float score = lowest, unused = 0.0;
    if (sees(band, query, key))
      score = score_of(given.p.x, s, head, uintBitsToFloat(STRIP_WORD(at)), i0 + query, j0 + key, unused);
    STRIP_WORD(at) = floatBitsToUint(score);
  }
}
void apply_dropout(HeadScores head, int half_tile, int64_t i0, int64_t j0) {
  for (int n = 0; n < OWN_ROWS * HALF_QUADS * 4; ++n) {
    const int r = n / (HALF_QUADS * 4), e = n % (HALF_QUADS * 4), at = own_quads(r) * 4 + e;
    const float kept_weight =
        uintBitsToFloat(STRIP_WORD(at)) * keep_of(given.p.x, head, i0 + strip_row() + own_row(r),
                                                  j0 + own_key(half_tile * HALF_QUADS * 4 + e));
    STRIP_WORD(at) = floatBitsToUint(OPERANDS == 1 ? min(kept_weight, 65504.0) : kept_weight);
  }
}
// Where quad q of the r-th own row is among the invocation's, and in shared memory, in its half.
#define OWN_AT(r, half_tile, q) (r) * QUADS + (half_tile) * HALF_QUADS + (q)
void read_own(int half_tile, inout vec4 x[OWN]) {
  UNROLLED for (int r = 0; r < OWN_ROWS; ++r)
    UNROLLED for (int q = 0; q < HALF_QUADS; ++q)
      x[OWN_AT(r, half_tile, q)] = uintBitsToFloat(strips[own_quads(r) + q]);
}

void main() {
  const int D = given.launch.D, Dv = given.launch.Dv, kind = OPERANDS;
  Place place;
  if (!query_place(given.p.x, given.launch.blocks, ROWS, place)) return;
  const DeviceSequence s = place.s;
  const int64_t i0 = place.first;
  const HeadScores head = head_scores(given.p.x, given.launch, place.b, place.h, given.kind.bias);
  const Rows queries = rows_at(given.p.x.q, place.b, s.q_begin + i0, place.h, s.nq - i0, D, kind, false);
  const Range strip = Range(i0 + strip_row(), lesser(i0 + strip_row() + STRIP, s.nq));
  const bool has_options = head.options.softcap || head.options.alibi || head.options.bias || head.options.mask;
  // A maximum is replaced when it is exceeded by this much: weights up to 2^8 are as exact as those up to 1, and sums
  // are seldom scaled.
  const float slack = head.options.dropout ? 0.0 : 8.0;

  float m[OWN_ROWS], l[OWN_ROWS], lost[OWN_ROWS];
  UNROLLED for (int r = 0; r < OWN_ROWS; ++r) m[r] = lowest, l[r] = 0.0, lost[r] = 0.0;
  LeftMatrix kept[QUERIES];
  SumMatrix sums[OUTPUTS];
  UNROLLED for (int n = 0; n < OUTPUTS; ++n) sums[n] = ZERO_SUM;
  load_queries(queries, area(), kept);

  const Range keys = visible_keys(s.mask, Range(i0, lesser(i0 + ROWS, s.nq)));
  const int64_t first = keys.begin / COLS * COLS;
  Rows key_rows = rows_at(given.p.x.k, place.b, s.k_begin + first, place.kv, s.nk - first, D, kind, false);
  Rows value_rows = rows_at(given.p.x.v, place.b, s.k_begin + first, place.kv, s.nk - first, Dv, kind, false);
  read_ahead(key_rows, 0);
  for (int64_t j0 = first; j0 < keys.end; j0 += COLS) {
    const int visible = tile_class(s.mask, strip, Range(j0, j0 + COLS));
    const bool idle = visible == TileClass_empty;
    SumMatrix S[SCORES];
    UNROLLED for (int n = 0; n < SCORES; ++n) S[n] = ZERO_SUM;
    UNROLLED for (int c = 0; c < D_CHUNKS; ++c)
      if (c * CHUNK < D) {
        const int at = put_columns(false);
        if ((c + 1) * CHUNK < D) read_ahead(key_rows, (c + 1) * CHUNK); else read_ahead(value_rows, 0);
        barrier();
        if (!idle) multiply_chunk(queries, c, at, area(), kept, S);
      }
    advance(key_rows, s.nk - j0 - COLS);

    LeftMatrix weights[WEIGHTS];
    if (!idle) {
      const bool simple = visible == TileClass_full && !has_options;
      vec4 x[OWN];
      UNROLLED for (int n = 0; n < HALVES; ++n) {
        store_scores(S, n, area());
        if (!simple) apply_options(head, s, band_of(s, i0, j0), n, i0, j0);
        read_own(n, x);
      }
      const float factor = simple ? head.numbers.factor : 1.0;
      float alpha[OWN_ROWS];
      bool stays = true;  // no maximum of these rows is new
      UNROLLED for (int r = 0; r < OWN_ROWS; ++r) {
        vec4 tops = vec4(lowest);
        UNROLLED for (int q = r * QUADS; q < (r + 1) * QUADS; ++q) x[q] *= factor, tops = max(tops, x[q]);
        float top = max(max(tops.x, tops.y), max(tops.z, tops.w));
        UNROLLED for (int n = 1; n < LANES_PER_ROW; n *= 2) top = max(top, subgroupShuffleXor(top, n));
        top = top > m[r] + slack ? top : m[r];
        const float base = top <= hidden ? 0.0 : top;  // so that what is hidden is 0, also where all is
        alpha[r] = exp2_of(m[r] - base);
        stays = stays && m[r] == top;
        m[r] = top;
        vec4 sum4 = vec4(0);
        UNROLLED for (int q = r * QUADS; q < (r + 1) * QUADS; ++q) {
          UNROLLED for (int e = 0; e < 4; ++e) x[q][e] = exp2_of(x[q][e] - base);
          sum4 += x[q];
        }
        float sum = (sum4.x + sum4.y) + (sum4.z + sum4.w);
        UNROLLED for (int n = 1; n < LANES_PER_ROW; n *= 2) sum += subgroupShuffleXor(sum, n);
        l[r] *= alpha[r], lost[r] *= alpha[r];
        add_compensated(l[r], lost[r], sum);
      }
      if (head.options.dropout)
        UNROLLED for (int n = 0; n < HALVES; ++n) {
          UNROLLED for (int r = 0; r < OWN_ROWS; ++r)
            UNROLLED for (int q = 0; q < HALF_QUADS; ++q)
              strips[own_quads(r) + q] = floatBitsToUint(x[OWN_AT(r, n, q)]);
          apply_dropout(head, n, i0, j0);
          read_own(n, x);
        }
      strip_barrier();  // alphas and weights take the place of scores that others have read
      if (!subgroupAll(stays)) {
        // Each row's alpha, once for each column of a matrix.
        UNROLLED for (int r = 0; r < OWN_ROWS; ++r)
          for (int n = lane() % LANES_PER_ROW; n < N; n += LANES_PER_ROW)
            STRIP_WORD(area() + own_row(r) * PITCH + n) = floatBitsToUint(alpha[r]);
        strip_barrier();
        UNROLLED for (int b = 0; b < BANDS; ++b) {
          SumMatrix alphas;
          LOAD_SUM(alphas, area() + b * M * PITCH);
          UNROLLED for (int c = 0; c < V_CHUNKS; ++c)
            UNROLLED for (int n = 0; n < WIDE; ++n)
              sums[(c * BANDS + b) * WIDE + n] = SCALED(sums[(c * BANDS + b) * WIDE + n], alphas);
        }
        strip_barrier();
      }
      UNROLLED for (int n = 0; n < OWN; n += 2)
        strips[own_weights(n / QUADS, n % QUADS)] = uvec4(four_weights(x[n]), four_weights(x[n + 1]));
      strip_barrier();
      load_weights(area(), weights);
    }
    UNROLLED for (int c = 0; c < V_CHUNKS; ++c)
      if (c * CHUNK < Dv) {
        const int at = put_columns(false);
        if ((c + 1) * CHUNK < Dv) read_ahead(value_rows, (c + 1) * CHUNK); else read_ahead(key_rows, 0);
        barrier();
        if (!idle) add_weighted(weights, at, c, sums);
      }
    advance(value_rows, s.nk - j0 - COLS);
  }

  strip_barrier();
  UNROLLED for (int r = 0; r < OWN_ROWS; ++r) {
    const int64_t i = i0 + strip_row() + own_row(r);
    const float inverse = finished(given.p.x, place.h, m[r], l[r]);
    STRIP_WORD(area() + own_row(r) * PITCH + FACTOR) = floatBitsToUint(inverse);
    if (given.p.lse.data != 0ul && i < s.nq && lane() % LANES_PER_ROW == 0)
      put_lse(number_of(given.p.lse, place.b, s.q_begin + i, place.h), m[r], l[r]);
  }
  store_sums(rows_at(given.p.o, place.b, s.q_begin + i0, place.h, s.nq - i0, Dv, given.kind.o, false), sums, false);
}
