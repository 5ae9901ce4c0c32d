// SPDX-License-Identifier: Apache-2.0
// Backward pass of vk_matrix, one text for both sides: a workgroup has 128 queries of a head and sums dQ over its keys,
// or 128 keys of a KV head and sums dK and dV over the queries of its heads; the other side comes 32 or 64 at a time.
// Products by cooperative matrices, P and dS rounded to the inputs' type. No atomics on sums: the order is fixed.
// Implements docs/algorithm.md, "Backward, tile by tile"; docs/vulkan.md, "vk_matrix".
#version 460
#extension GL_GOOGLE_include_directive : require
#include "matrix.glsl"
#include "pair.glsl"

layout(constant_id = 0) const int V_CHUNKS = 1;    // of Dv, 64 each
layout(constant_id = 1) const int D_CHUNKS = 1;    // of D
layout(constant_id = 2) const bool KEYS = false;   // rows are keys
layout(constant_id = 7) const bool KEPT = true;    // the rows' operands stay in registers
layout(constant_id = 8) const bool SUM_V = false;  // dV; only where rows are keys
layout(constant_id = 9) const bool SUM_QK = true;  // dQ or dK

// Matrices of both row operands, and of both sums.
const int QK_ROWS = (KEPT ? D_CHUNKS : 1) * BANDS * DEPTH, V_ROWS = (KEPT ? V_CHUNKS : 1) * BANDS * DEPTH;
const int V_WIDE = SUM_V ? V_CHUNKS : 1, QK_WIDE = SUM_QK ? D_CHUNKS : 1;
const int V_SUMS = V_WIDE * BANDS * WIDE, QK_SUMS = QK_WIDE * BANDS * WIDE;
ROW_OPERAND(load_qk_chunk, load_qk, multiply_qk, D_CHUNKS, QK_ROWS)
ROW_OPERAND(load_v_chunk, load_v, multiply_v, V_CHUNKS, V_ROWS)
ADD_WEIGHTED(add_v, V_SUMS)
ADD_WEIGHTED(add_qk, QK_SUMS)
STORE_SUMS(store_v, V_WIDE, V_SUMS)
STORE_SUMS(store_qk, QK_WIDE, QK_SUMS)

const int OWN = OWN_ROWS * QUADS;

// The strip's scores, half after half, to the invocation's own.
void take_scores(inout SumMatrix S[SCORES], inout vec4 x[OWN]) {
  UNROLLED for (int n = 0; n < HALVES; ++n) {
    store_scores(S, n, area());
    UNROLLED for (int r = 0; r < OWN_ROWS; ++r)
      UNROLLED for (int q = 0; q < HALF_QUADS; ++q)
        x[r * QUADS + n * HALF_QUADS + q] = uintBitsToFloat(strips[own_quads(r) + q]);
  }
}

// From S and dP to P and dS: of a tile that all queries see, without options.
void plain_gradients(float factor, inout vec4 x[OWN], inout vec4 y[OWN]) {
  UNROLLED for (int n = 0; n < OWN; ++n)
    UNROLLED for (int e = 0; e < 4; ++e) {
      const int query = KEYS ? own_key(n % QUADS * 4 + e) : strip_row() + own_row(n / QUADS);
      const float P = exp2_of(x[n][e] * factor - query_lse[query]);
      x[n][e] = P;
      y[n][e] = P == 0.0 ? 0.0 : P * (y[n][e] - query_delta[query]);
    }
}

// Of any tile: a loop, since scores have many options.
void gradients(BackwardParams p, DeviceSequence s, HeadScores head, int64_t i0, int64_t j0, inout vec4 x[OWN],
               inout vec4 y[OWN]) {
  const TileBand band = band_of(s, i0, j0);
  float S[OWN * 4], dP[OWN * 4];
  UNROLLED for (int n = 0; n < OWN * 4; ++n) S[n] = x[n / 4][n % 4], dP[n] = y[n / 4][n % 4];
  [[dont_unroll]] for (int n = 0; n < OWN * 4; ++n) {
    const int row = strip_row() + own_row(n / (QUADS * 4)), column = own_key(n % (QUADS * 4));
    float P, dS;
    pair_gradient(p, s, head, band, i0, j0, KEYS ? column : row, KEYS ? row : column, S[n], dP[n], false, P, dS);
    S[n] = P, dP[n] = dS;
  }
  UNROLLED for (int n = 0; n < OWN * 4; ++n) x[n / 4][n % 4] = S[n], y[n / 4][n % 4] = dP[n];
}

// P or dS as a left operand.
void make_weights(inout vec4 x[OWN], inout LeftMatrix weights[WEIGHTS]) {
  strip_barrier();  // they take the place of what others have read
  UNROLLED for (int n = 0; n < OWN; n += 2)
    strips[own_weights(n / QUADS, n % QUADS)] = uvec4(four_bits(x[n]), four_bits(x[n + 1]));
  strip_barrier();
  load_weights(area(), weights);
}

void put_factor(float factor) {
  strip_barrier();
  for (int n = lane(); n < STRIP; n += LANES) STRIP_WORD(area() + n * PITCH + FACTOR) = floatBitsToUint(factor);
}

void main() {
  const int D = given.launch.D, Dv = given.launch.Dv, kind = OPERANDS;
  Place place;
  const int64_t blocks = given.launch.blocks;
  if (KEYS ? !key_place(given.p.x, blocks, ROWS, place) : !query_place(given.p.x, blocks, ROWS, place)) return;
  const DeviceSequence s = place.s;
  const int64_t row0 = place.first;
  const Range own = Range(row0, lesser(row0 + ROWS, KEYS ? s.nk : s.nq));
  const Range strip = Range(row0 + strip_row(), lesser(row0 + strip_row() + STRIP, own.end));
  const Range others = KEYS ? visible_queries(s.mask, own) : visible_keys(s.mask, own);
  const bool one_chunk = D <= CHUNK && Dv <= CHUNK;  // columns of both operands stay until the second products

  LeftMatrix qk_rows[QK_ROWS], v_rows[V_ROWS];
  SumMatrix v_sums[V_SUMS], qk_sums[QK_SUMS];
  UNROLLED for (int n = 0; n < V_SUMS; ++n) v_sums[n] = ZERO_SUM;
  UNROLLED for (int n = 0; n < QK_SUMS; ++n) qk_sums[n] = ZERO_SUM;

  if (!KEYS) {
    load_query_numbers(given.p, s, place.b, place.h, row0);
    barrier();
  }
  Rows qk_own = rows_at(given.p.x.q, place.b, s.q_begin + row0, place.h, s.nq - row0, D, kind, true);
  Rows v_own = rows_at(given.p.d_o, place.b, s.q_begin + row0, place.h, s.nq - row0, Dv, kind, true);
  if (KEYS) {
    qk_own = rows_at(given.p.x.k, place.b, s.k_begin + row0, place.kv, s.nk - row0, D, kind, false);
    v_own = rows_at(given.p.x.v, place.b, s.k_begin + row0, place.kv, s.nk - row0, Dv, kind, false);
  }
  load_qk(qk_own, area(), qk_rows);
  if (SUM_QK) load_v(v_own, area(), v_rows);

  const int heads = KEYS ? given.p.x.Hq / given.p.x.Hk : 1;
  const int64_t first = others.begin / COLS * COLS;
  for (int g = 0; g < heads; ++g) {
    const int h = place.h + g;
    const HeadScores head = head_scores(given.p.x, given.launch, place.b, h, given.kind.bias);
    const bool has_options = head.options.softcap || head.options.alibi || head.options.bias || head.options.mask ||
                             head.options.dropout;
    Rows qk_others = rows_at(given.p.x.k, place.b, s.k_begin + first, place.kv, s.nk - first, D, kind, false);
    Rows v_others = rows_at(given.p.x.v, place.b, s.k_begin + first, place.kv, s.nk - first, Dv, kind, false);
    if (KEYS) {
      qk_others = rows_at(given.p.x.q, place.b, s.q_begin + first, h, s.nq - first, D, kind, true);
      v_others = rows_at(given.p.d_o, place.b, s.q_begin + first, h, s.nq - first, Dv, kind, true);
      read_numbers(given.p, s, place.b, h, first);
    }
    read_ahead(qk_others, 0);
    for (int64_t column0 = first; column0 < others.end; column0 += COLS) {
      const int64_t i0 = KEYS ? column0 : row0, j0 = KEYS ? row0 : column0;
      barrier();  // everybody is done with the columns and their numbers
      if (KEYS) {
        put_numbers();
        read_numbers(given.p, s, place.b, h, column0 + COLS);
        barrier();
      }
      Range queries = strip, keys = Range(column0, column0 + COLS);
      if (KEYS) queries = Range(column0, lesser(column0 + COLS, s.nq)), keys = strip;
      const int visible = tile_class(s.mask, queries, keys);
      const bool idle = visible == TileClass_empty;
      Rows next = qk_others;
      advance(next, (KEYS ? s.nq : s.nk) - column0 - COLS);

      SumMatrix S[SCORES];
      vec4 x[OWN], y[OWN];
      UNROLLED for (int n = 0; n < OWN; ++n) x[n] = y[n] = vec4(0);
      UNROLLED for (int n = 0; n < SCORES; ++n) S[n] = ZERO_SUM;
      int qk_at = 0, v_at = 0;
      UNROLLED for (int c = 0; c < D_CHUNKS; ++c)
        if (c * CHUNK < D) {
          qk_at = put_columns(KEYS);
          if ((c + 1) * CHUNK < D) read_ahead(qk_others, (c + 1) * CHUNK); else read_ahead(v_others, 0);
          barrier();
          if (!idle) multiply_qk(qk_own, c, qk_at, area(), qk_rows, S);
        }
      if (!idle) take_scores(S, x);
      if (SUM_QK) {
        UNROLLED for (int n = 0; n < SCORES; ++n) S[n] = ZERO_SUM;
        UNROLLED for (int c = 0; c < V_CHUNKS; ++c)
          if (c * CHUNK < Dv) {
            v_at = put_columns(KEYS);
            if ((c + 1) * CHUNK < Dv) read_ahead(v_others, (c + 1) * CHUNK);
            else if (one_chunk) read_ahead(next, 0);
            else if (SUM_V) read_ahead(v_others, 0);
            else read_ahead(qk_others, 0);
            barrier();
            if (!idle) multiply_v(v_own, c, v_at, area(), v_rows, S);
          }
        if (!idle) take_scores(S, y);
      }
      LeftMatrix weights[WEIGHTS];
      if (!idle) {
        if (visible == TileClass_full && !has_options)
          plain_gradients(head.numbers.factor, x, y);
        else
          gradients(given.p, s, head, i0, j0, x, y);
      }
      if (SUM_V) {
        if (!idle) make_weights(x, weights);
        UNROLLED for (int c = 0; c < V_WIDE; ++c)
          if (c * CHUNK < Dv) {
            int at = v_at;
            if (!(one_chunk && SUM_QK)) {
              at = put_columns(KEYS);
              if ((c + 1) * CHUNK < Dv) read_ahead(v_others, (c + 1) * CHUNK);
              else if (SUM_QK) read_ahead(qk_others, 0);
              else read_ahead(next, 0);
              barrier();
            }
            if (!idle) add_v(weights, at, c, v_sums);
          }
      }
      if (SUM_QK) {
        if (!idle) make_weights(y, weights);
        UNROLLED for (int c = 0; c < QK_WIDE; ++c)
          if (c * CHUNK < D) {
            int at = qk_at;
            if (!one_chunk) {
              at = put_columns(KEYS);
              if ((c + 1) * CHUNK < D) read_ahead(qk_others, (c + 1) * CHUNK); else read_ahead(next, 0);
              barrier();
            }
            if (!idle) add_qk(weights, at, c, qk_sums);
          }
      }
      qk_others = next;
      advance(v_others, (KEYS ? s.nq : s.nk) - column0 - COLS);
    }
  }

  const bool accumulate = given.p.accumulate != 0;
  if (SUM_V && given.p.dv.data != 0ul) {
    put_factor(1.0);
    const Rows rows = rows_at(given.p.dv, place.b, s.k_begin + row0, place.kv, s.nk - row0, Dv, given.kind.dv, false);
    store_v(rows, v_sums, accumulate);
  }
  if (SUM_QK && (KEYS ? given.p.dk.data : given.p.dq.data) != 0ul) {
    put_factor(given.p.x.scale);
    Rows rows = rows_at(given.p.dq, place.b, s.q_begin + row0, place.h, s.nq - row0, D, given.kind.dq, false);
    if (KEYS) rows = rows_at(given.p.dk, place.b, s.k_begin + row0, place.kv, s.nk - row0, D, given.kind.dk, false);
    store_qk(rows, qk_sums, accumulate);
  }
}
