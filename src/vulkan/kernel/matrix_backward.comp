// SPDX-License-Identifier: Apache-2.0
// Backward pass of vk_matrix, one text for both sides: a workgroup has 64 queries of a head and sums dQ over its keys, or
// 64 keys of a KV head and sums dK and dV over the queries of its heads; the other side comes 32 at a time. Products by
// cooperative matrices, P and dS rounded to the inputs' type. No atomics on sums: the order is fixed.
// Implements docs/algorithm.md, "Backward, tile by tile"; docs/vulkan.md, "vk_matrix".
#version 460
#extension GL_GOOGLE_include_directive : require
#define SUBGROUPS 4
#define AREAS 2
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
ROW_OPERAND(load_qk_chunk, load_qk, multiply_qk_chunk, multiply_qk, D_CHUNKS, QK_ROWS)
ROW_OPERAND(load_v_chunk, load_v, multiply_v_chunk, multiply_v, V_CHUNKS, V_ROWS)
ADD_WEIGHTED(add_v, V_SUMS)
ADD_WEIGHTED(add_qk, QK_SUMS)
STORE_SUMS(store_v, V_WIDE, V_SUMS)
STORE_SUMS(store_qk, QK_WIDE, QK_SUMS)

// P and dS of the strip's pairs, 16 bits each, from S in area 0 and dP in area 1: P takes the place of S, dS that of dP.
// Neighbours' results are put where their own numbers were, and pushed together when all have read theirs.
void strip_gradients(BackwardParams p, DeviceSequence s, HeadScores head, int64_t i0, int64_t j0, int kind) {
  const TileBand band = band_of(s, i0, j0);
  for (int r = 0; r < OWN_ROWS; ++r)
    for (int n = 0; n < OWN_PAIRS; ++n) {
      const int row = own_row(r), place = row * PITCH + 2 * own_pair(n);
      uint P_word = 0u, dS_word = 0u;
      for (int e = 0; e < 2; ++e) {
        const int column = 2 * own_pair(n) + e;
        const int query = KEYS ? column : strip_row() + row, key = KEYS ? strip_row() + row : column;
        float P, dS;
        pair_gradient(p, s, head, band, i0, j0, query, key, uintBitsToFloat(STRIP_WORD(area(0) + place + e)),
                      SUM_QK ? uintBitsToFloat(STRIP_WORD(area(1) + place + e)) : 0.0, false, P, dS);
        P_word |= narrowed(P, kind) << (16 * e), dS_word |= narrowed(dS, kind) << (16 * e);
      }
      STRIP_WORD(area(0) + place) = P_word, STRIP_WORD(area(1) + place) = dS_word;
    }
  uint words[2 * OWN_ROWS * OWN_PAIRS];
  UNROLLED for (int n = 0; n < OWN_ROWS * OWN_PAIRS; ++n) {
    const int place = own_row(n / OWN_PAIRS) * PITCH + 2 * own_pair(n % OWN_PAIRS);
    words[2 * n] = STRIP_WORD(area(0) + place), words[2 * n + 1] = STRIP_WORD(area(1) + place);
  }
  strip_barrier();
  UNROLLED for (int n = 0; n < OWN_ROWS * OWN_PAIRS; ++n) {
    const int place = own_row(n / OWN_PAIRS) * PITCH + own_pair(n % OWN_PAIRS);
    STRIP_WORD(area(0) + place) = words[2 * n], STRIP_WORD(area(1) + place) = words[2 * n + 1];
  }
  strip_barrier();
}

void put_factor(float factor) {
  strip_barrier();
  for (int n = lane(); n < STRIP; n += LANES) STRIP_WORD(area(1) + n * PITCH + FACTOR) = floatBitsToUint(factor);
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
  load_qk(qk_own, area(0), qk_rows);
  if (SUM_QK) load_v(v_own, area(0), v_rows);

  const int heads = KEYS ? given.p.x.Hq / given.p.x.Hk : 1;
  for (int g = 0; g < heads; ++g) {
    const int h = place.h + g;
    const HeadScores head = head_scores(given.p.x, given.launch, place.b, h, given.kind.bias);
    for (int64_t column0 = others.begin / COLS * COLS; column0 < others.end; column0 += COLS) {
      const int64_t i0 = KEYS ? column0 : row0, j0 = KEYS ? row0 : column0;
      if (KEYS) load_query_numbers(given.p, s, place.b, h, i0);
      barrier();
      Rows qk_others = rows_at(given.p.x.k, place.b, s.k_begin + j0, place.kv, s.nk - j0, D, kind, false);
      Rows v_others = rows_at(given.p.x.v, place.b, s.k_begin + j0, place.kv, s.nk - j0, Dv, kind, false);
      if (KEYS) {
        qk_others = rows_at(given.p.x.q, place.b, s.q_begin + i0, h, s.nq - i0, D, kind, true);
        v_others = rows_at(given.p.d_o, place.b, s.q_begin + i0, h, s.nq - i0, Dv, kind, true);
      }
      Range queries = strip, keys = Range(column0, column0 + COLS);
      if (KEYS) queries = Range(column0, lesser(column0 + COLS, s.nq)), keys = strip;
      const bool idle = tile_class(s.mask, queries, keys) == TileClass_empty;

      SumMatrix S[SCORES];
      const int qk_at = multiply_qk(qk_own, qk_others, idle, area(0), qk_rows, S);
      if (!idle) store_scores(S, area(0));
      int v_at = 0;
      if (SUM_QK) {
        v_at = multiply_v(v_own, v_others, idle, area(1), v_rows, S);
        if (!idle) store_scores(S, area(1));
      }
      LeftMatrix weights[WEIGHTS];
      if (!idle) strip_gradients(given.p, s, head, i0, j0, kind);
      if (SUM_V) {
        if (!idle) load_weights(area(0), weights);
        UNROLLED for (int c = 0; c < V_WIDE; ++c)
          if (c * CHUNK < Dv) {
            const int at = one_chunk && SUM_QK ? v_at : stage_columns(v_others, c * CHUNK);
            if (!idle) add_v(weights, at, c, v_sums);
          }
      }
      if (SUM_QK) {
        if (!idle) load_weights(area(1), weights);
        UNROLLED for (int c = 0; c < QK_WIDE; ++c)
          if (c * CHUNK < D) {
            const int at = one_chunk ? qk_at : stage_columns(qk_others, c * CHUNK);
            if (!idle) add_qk(weights, at, c, qk_sums);
          }
      }
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
