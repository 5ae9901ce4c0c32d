// SPDX-License-Identifier: Apache-2.0
// S, dP, P and dS of a tile of scores. Included by the backward kernels of vk_tiled. Implements docs/algorithm.md,
// "Backward, tile by tile".
#include "pair.glsl"

// S = rows . columns^T; their first dims were read before. Everybody must be done with the tile. Meanwhile what comes
// next is read: the first of `next_columns` as values, or as columns, with the rows beside them. Queries that are blind
// are not asked for: no score of theirs becomes a gradient.
void multiply_rows(Rows rows, Rows columns, bool values_next, Rows next_rows, Rows next_columns, out float S[SCORES]) {
  rows.queries = columns.queries = false;
  [[unroll]] for (int n = 0; n < SCORES; ++n) S[n] = 0.0;
  for (int d0 = 0; d0 < rows.width; d0 += DEPTH) {
    if (d0 > 0) barrier();
    put_operands(rows, false, columns, d0);
    if (d0 + DEPTH < rows.width) {
      read_rows(rows, 0, d0 + DEPTH);
      read_columns(columns, 0, d0 + DEPTH);
    } else if (values_next) {
      read_values(next_columns, 0, 0);
    } else {
      read_rows(next_rows, 0, 0);
      read_columns(next_columns, 0, 0);
    }
    barrier();
    multiply(rows.width - d0, S);
  }
}

// From products S = rows . columns^T of Q and K, and dP of dO and V, to P times the dropout factor and to dS. First of
// tiles without options that all their queries see.
void plain_gradients(float factor, bool rows_are_keys, inout float S[SCORES], inout float dP[SCORES]) {
  [[unroll]] for (int n = 0; n < SCORES; ++n) {
    const int query = rows_are_keys ? own_column(n % 4) : own_row(n / 4);
    const float lse = query_lse[query];
    S[n] = lse < blind ? exp2_of(S[n] * factor - lse) : 0.0;
    dP[n] = lse < blind ? S[n] * (dP[n] - query_delta[query]) : 0.0;
  }
}

// Of any tile. A loop, not copies of it: scores have many options, and two turns of it, half of the scores each, whose
// numbers lie in shared memory, since registers have none. Everybody must be done with the tile.
const int HALF = SCORES / 2;
int own_slot(int n) { return (n / 4 * THREADS + invocation()) * 4 + n % 4; }
void pair_gradients(BackwardParams p, DeviceSequence s, HeadScores head, int64_t i0, int64_t j0, bool rows_are_keys,
                    inout float S[SCORES], inout float dP[SCORES], bool before_softcap) {
  const TileBand band = band_of(s, i0, j0);
  [[dont_unroll]] for (int turn = 0; turn < 2; ++turn) {
    [[unroll]] for (int n = 0; n < HALF; ++n) {
      TILE_WORD(own_slot(n)) = S[n];
      TILE_WORD(own_slot(HALF + n)) = dP[n];
    }
    [[dont_unroll]] for (int n = 0; n < HALF; ++n) {
      const int row = own_row(turn * (OWN / 2) + n / 4), column = own_column(n % 4);
      const int query = rows_are_keys ? column : row, key = rows_are_keys ? row : column;
      const int at = own_slot(n), dP_at = own_slot(HALF + n);
      float P, dS;
      pair_gradient(p, s, head, band, i0, j0, query, key, TILE_WORD(at), TILE_WORD(dP_at), before_softcap, P, dS);
      TILE_WORD(at) = P, TILE_WORD(dP_at) = dS;
    }
    // The other half takes the first one's place, and twice so.
    [[unroll]] for (int n = 0; n < HALF; ++n) {
      S[n] = S[HALF + n], S[HALF + n] = TILE_WORD(own_slot(n));
      dP[n] = dP[HALF + n], dP[HALF + n] = TILE_WORD(own_slot(HALF + n));
    }
  }
}
