// SPDX-License-Identifier: Apache-2.0
// Backward pass of vk_tiled, one text for both sides: a workgroup has 32, 64 or 128 queries of a head and sums dQ over
// its keys, or as many keys of a KV head and sums dK and dV over the queries of its heads. No atomics on sums: their
// order is fixed. Implements docs/algorithm.md, "Backward, tile by tile"; docs/vulkan.md.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "tile.glsl"
#include "tile_pair.glsl"

layout(constant_id = 0) const int V_CHUNKS = 1;   // of dV, CHUNK dims each; 0: no dV, nor for queries
layout(constant_id = 1) const int QK_CHUNKS = 1;  // of dQ or dK; 0: neither
layout(constant_id = 2) const bool KEYS = false;  // rows are keys
const bool SUM_V = V_CHUNKS > 0, SUM_QK = QK_CHUNKS > 0;
const int V_SIZE = V_CHUNKS > 0 ? V_CHUNKS : 1, QK_SIZE = QK_CHUNKS > 0 ? QK_CHUNKS : 1;

// sums += weights . columns, whose first dims were read before. Meanwhile what comes next is read: the first of
// `next_columns` as values, or as columns, with the rows beside them.
#define ADD_PRODUCT(name, CHUNKS)                                                                                  \
  void name(float weights[SCORES], Rows columns, bool values_next, Rows next_rows, Rows next_columns,              \
            inout float sums[CHUNKS][SUMS]) {                                                                      \
    barrier(); /* everybody is done with the tile */                                                               \
    put_weights(weights);                                                                                          \
    [[unroll]] for (int c = 0; c < CHUNKS; ++c)                                                                    \
      if (c * CHUNK < columns.width) {                                                                             \
        float part[SUMS];                                                                                          \
        [[unroll]] for (int n = 0; n < SUMS; ++n) part[n] = 0.0;                                                   \
        for (int column0 = 0; column0 < COLS; column0 += VALUES) {                                                 \
          if (c + column0 > 0) barrier();                                                                          \
          put_values(columns, column0, c * CHUNK);                                                                 \
          if (column0 + VALUES < COLS) {                                                                           \
            read_values(columns, column0 + VALUES, c * CHUNK);                                                     \
          } else if ((c + 1) * CHUNK < columns.width) {                                                            \
            read_values(columns, 0, (c + 1) * CHUNK);                                                              \
          } else if (values_next) {                                                                                \
            read_values(next_columns, 0, 0);                                                                       \
          } else {                                                                                                 \
            read_rows(next_rows, 0, 0);                                                                            \
            read_columns(next_columns, 0, 0);                                                                      \
          }                                                                                                        \
          barrier();                                                                                               \
          add_weighted(column0, part);                                                                             \
        }                                                                                                          \
        [[unroll]] for (int n = 0; n < SUMS; ++n) sums[c][n] += part[n];                                           \
      }                                                                                                            \
  }
ADD_PRODUCT(add_v, V_SIZE)
ADD_PRODUCT(add_qk, QK_SIZE)

void main() {
  const int D = given.launch.D, Dv = given.launch.Dv;
  const int kind = PLAIN ? 0 : given.kind.q, d_o_kind = PLAIN ? 0 : given.kind.d_o;
  Place place;
  const int64_t blocks = given.launch.blocks;
  if (KEYS ? !key_place(given.p.x, blocks, ROWS, place) : !query_place(given.p.x, blocks, ROWS, place)) return;
  const DeviceSequence s = place.s;
  const int64_t row0 = place.first;

  float v_sums[V_SIZE][SUMS], qk_sums[QK_SIZE][SUMS];
  [[unroll]] for (int c = 0; c < V_SIZE; ++c) [[unroll]] for (int n = 0; n < SUMS; ++n) v_sums[c][n] = 0.0;
  [[unroll]] for (int c = 0; c < QK_SIZE; ++c) [[unroll]] for (int n = 0; n < SUMS; ++n) qk_sums[c][n] = 0.0;

  const Range own = Range(row0, lesser(row0 + ROWS, KEYS ? s.nk : s.nq));
  const Range others = KEYS ? visible_queries(s.mask, own) : visible_keys(s.mask, own);
  const int64_t first = others.begin / COLS * COLS, length = KEYS ? s.nq : s.nk;
  if (!KEYS) load_query_numbers(given.p, s, place.b, place.h, row0);
  Rows qk_own = rows_at(given.p.x.q, place.b, s.q_begin + row0, place.h, s.nq - row0, D, kind, false);
  Rows v_own = rows_at(given.p.d_o, place.b, s.q_begin + row0, place.h, s.nq - row0, Dv, d_o_kind, false);
  if (KEYS) {
    qk_own = rows_at(given.p.x.k, place.b, s.k_begin + row0, place.kv, s.nk - row0, D, kind, false);
    v_own = rows_at(given.p.x.v, place.b, s.k_begin + row0, place.kv, s.nk - row0, Dv, kind, false);
  }
  const int heads = KEYS ? given.p.x.Hq / given.p.x.Hk : 1;
  for (int g = 0; g < heads; ++g) {
    const int h = place.h + g;
    const HeadScores head = head_of(given.p.x, given.launch, place.b, h, given.kind.bias);
    const bool has_options = head.options.softcap || head.options.alibi || head.options.bias || head.options.mask ||
                             head.options.dropout;
    Rows qk_others = rows_at(given.p.x.k, place.b, s.k_begin + first, place.kv, s.nk - first, D, kind, false);
    Rows v_others = rows_at(given.p.x.v, place.b, s.k_begin + first, place.kv, s.nk - first, Dv, kind, false);
    if (KEYS) {
      qk_others = rows_at(given.p.x.q, place.b, s.q_begin + first, h, s.nq - first, D, kind, true);
      v_others = rows_at(given.p.d_o, place.b, s.q_begin + first, h, s.nq - first, Dv, d_o_kind, true);
      read_numbers(given.p, s, place.b, h, first);
    }
    read_rows(qk_own, 0, 0);
    read_columns(qk_others, 0, 0);
    for (int64_t column0 = first; column0 < others.end; column0 += COLS) {
      const int64_t i0 = KEYS ? column0 : row0, j0 = KEYS ? row0 : column0;
      Rows next = qk_others;
      advance(next, length - column0 - COLS);
      barrier();  // everybody is done with the tile, and with the numbers of its columns
      if (KEYS) {
        put_numbers();
        read_numbers(given.p, s, place.b, h, column0 + COLS);
      }
      float S[SCORES], dP[SCORES];
      multiply_rows(qk_own, qk_others, !SUM_QK, v_own, v_others, S);
      [[unroll]] for (int n = 0; n < SCORES; ++n) dP[n] = 0.0;
      if (SUM_QK) {
        Rows first_values = qk_others;
        if (SUM_V) first_values = v_others;
        barrier();
        multiply_rows(v_own, v_others, true, v_own, first_values, dP);
      }
      const Range columns = Range(column0, KEYS ? lesser(column0 + COLS, s.nq) : column0 + COLS);
      if (!has_options && tile_class(s.mask, KEYS ? columns : own, KEYS ? own : columns) == TileClass_full) {
        plain_gradients(head.numbers.factor, KEYS, S, dP);
      } else {
        barrier();
        pair_gradients(given.p, s, head, i0, j0, KEYS, S, dP, false);
      }
      if (SUM_V) {
        Rows columns_next = next;
        if (SUM_QK) columns_next = qk_others;
        add_v(S, v_others, SUM_QK, qk_own, columns_next, v_sums);
      }
      if (SUM_QK) add_qk(dP, qk_others, false, qk_own, next, qk_sums);
      qk_others = next;
      advance(v_others, length - column0 - COLS);
    }
  }

  const bool accumulate = given.p.accumulate != 0;
  if (SUM_V) {
    const Rows rows = rows_at(given.p.dv, place.b, s.k_begin + row0, place.kv, s.nk - row0, Dv, given.kind.dv, false);
    [[unroll]] for (int c = 0; c < V_SIZE; ++c) store_sums(rows, c * CHUNK, v_sums[c], 1.0, accumulate);
  }
  if (SUM_QK) {
    Rows rows = rows_at(given.p.dq, place.b, s.q_begin + row0, place.h, s.nq - row0, D, given.kind.dq, false);
    if (KEYS) rows = rows_at(given.p.dk, place.b, s.k_begin + row0, place.kv, s.nk - row0, D, given.kind.dk, false);
    [[unroll]] for (int c = 0; c < QK_SIZE; ++c)
      store_sums(rows, c * CHUNK, qk_sums[c], given.p.x.scale, accumulate);
  }
}
