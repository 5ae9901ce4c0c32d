// SPDX-License-Identifier: Apache-2.0
// dBias: a workgroup owns a tile of it and adds up dS over every dimension along which the bias was broadcast
// (sequences, heads, queries, keys), in a fixed order, with compensated sums. Implements docs/algorithm.md, "Backward".
#version 460
#extension GL_GOOGLE_include_directive : require
#include "tile.glsl"
#include "tile_pair.glsl"

// What a workgroup sums over along one dimension: its own part of it, or all if the bias was broadcast.
Range terms_of(bool broadcast, int64_t first, int64_t block, int64_t length) {
  if (broadcast) return Range(0l, length);
  return Range(first, lesser(first + block, length));
}

void main() {
  const int64_t number = block_number();
  if (number >= given.launch.blocks) return;
  const int64_t key_tiles = ceil_div(given.p.dbias_keys, COLS), row_tiles = ceil_div(given.p.dbias_rows, ROWS);
  const int64_t own_j = remainder(number, key_tiles) * COLS, row_number = quotient(number, key_tiles);
  const int64_t own_i = remainder(row_number, row_tiles) * ROWS;
  const int slice = int(quotient(row_number, row_tiles)), heads_there = given.p.dbias_heads;
  const int h0 = slice % heads_there, b0 = slice / heads_there;
  const bool one_row = given.p.dbias_rows == 1, one_key = given.p.dbias_keys == 1;

  float sum[SCORES], lost[SCORES];
  [[unroll]] for (int n = 0; n < SCORES; ++n) sum[n] = 0.0, lost[n] = 0.0;
  const Range batches = terms_of(given.p.dbias_batches == 1, b0, 1, given.p.x.B);
  const Range heads = terms_of(heads_there == 1, h0, 1, given.p.x.Hq);
  for (int b = int(batches.begin); b < int(batches.end); ++b) {
    const DeviceSequence s = sequence_of(given.p.x, b);
    const Range rows = terms_of(one_row, own_i, ROWS, s.nq);
    for (int h = int(heads.begin); h < int(heads.end); ++h) {
      const int kv = h / (given.p.x.Hq / given.p.x.Hk);
      const HeadScores head = head_scores(given.p.x, given.launch, b, h, given.kind.bias);
      for (int64_t i0 = rows.begin; i0 < rows.end; i0 += ROWS) {
        load_query_numbers(given.p, s, b, h, i0);
        barrier();
        const Rows q = rows_at(given.p.x.q, b, s.q_begin + i0, h, s.nq - i0, given.launch.D, given.kind.q, false);
        const Rows d_o = rows_at(given.p.d_o, b, s.q_begin + i0, h, s.nq - i0, given.launch.Dv, given.kind.d_o, false);
        const Range seen = visible_keys(s.mask, Range(i0, lesser(i0 + ROWS, s.nq)));
        Range keys = terms_of(one_key, own_j, COLS, s.nk);
        if (one_key) keys = Range(seen.begin / COLS * COLS, seen.end);
        if (seen.begin >= keys.end || seen.end <= keys.begin) continue;
        for (int64_t j0 = keys.begin; j0 < keys.end; j0 += COLS) {
          const Rows k = rows_at(given.p.x.k, b, s.k_begin + j0, kv, s.nk - j0, given.launch.D, given.kind.q, false);
          const Rows v = rows_at(given.p.x.v, b, s.k_begin + j0, kv, s.nk - j0, given.launch.Dv, given.kind.q, false);
          float S[SCORES], dP[SCORES];
          read_rows(q, 0, 0);
          read_columns(k, 0, 0);
          barrier();  // everybody is done with the tile
          multiply_rows(q, k, false, d_o, v, S);
          barrier();
          multiply_rows(d_o, v, false, Rows(0ul, 0l, 0, 0, 0, false), Rows(0ul, 0l, 0, 0, 0, false), dP);
          barrier();
          pair_gradients(given.p, s, head, i0, j0, false, S, dP, true);
          [[unroll]] for (int n = 0; n < SCORES; ++n) add_compensated(sum[n], lost[n], dP[n]);
        }
      }
    }
  }

  barrier();
  [[unroll]] for (int n = 0; n < SCORES; ++n) TILE_WORD(own_place(n)) = sum[n];
  barrier();
  const int row_count = one_row ? 1 : ROWS, key_count = one_key ? 1 : COLS;
  for (int n = invocation(); n < row_count * key_count; n += THREADS) {
    const int row = n / key_count, key = n % key_count;
    if (own_i + row >= given.p.dbias_rows || own_j + key >= given.p.dbias_keys) continue;
    float total = 0.0, rest = 0.0;
    for (int r = row; r < (one_row ? ROWS : row + 1); ++r)
      for (int c = key; c < (one_key ? COLS : key + 1); ++c)
        add_compensated(total, rest, TILE_WORD((WEIGHTS_AT + c * WEIGHT_PITCH) * 4 + r));
    const int64_t index = pair_index(given.p.dbias, b0, h0, own_i + row, own_j + key);
    const uint64_t at = given.p.dbias.data + uint64_t(index) * element_bytes(given.kind.dbias);
    if (given.p.accumulate != 0) total += number_at(at, given.kind.dbias);
    put_number(at, given.kind.dbias, total);
  }
}
