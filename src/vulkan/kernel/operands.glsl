// SPDX-License-Identifier: Apache-2.0
// What the tiles of vk_tiled and of vk_matrix share: rows of an operand, the numbers of the queries, the band of a mask
// inside a tile. Included by tile.glsl, matrix.glsl and vk_tiled's forward.comp, which say how many ROWS a tile has: no
// fewer than columns, or keys would be lost, since one bound holds for both.
// docs/vulkan.md, "Rungs".
shared float query_lse[ROWS], query_delta[ROWS];

int invocation() { return int(gl_LocalInvocationIndex); }

// Rows of one operand: row n begins at `first` + n * `distance`; those from `count` on, and blind queries', are 0.
struct Rows {
  uint64_t first;
  int64_t distance;
  int count, width, kind;
  bool queries;  // of a backward pass: query_lse says which are blind
};

Rows rows_at(TokenRef t, int b, int64_t token, int h, int64_t count, int width, int kind, bool queries) {
  return Rows(row_of(t, b, token, h, kind), t.token * int64_t(element_bytes(kind)), int(clamped(count, 0, ROWS)), width,
              kind, queries);
}

// Whether a row has numbers that count, which others than zeros may stand for.
bool counts(Rows rows, int row) { return row < rows.count && !(rows.queries && query_lse[row] >= blind); }

// The band inside a tile: row + low <= column <= row + high, in 32 bits. What is far beyond a tile is far enough.
struct TileBand { int rows, columns, low, high; };

TileBand band_of(DeviceSequence s, int64_t i0, int64_t j0) {
  const int64_t far = 1l << 20;
  return TileBand(int(clamped(s.nq - i0, 0, ROWS)), int(clamped(s.nk - j0, 0, ROWS)),
                  int(clamped(s.mask.low + i0 - j0, -far, far)), int(clamped(s.mask.high + i0 - j0, -far, far)));
}

bool sees(TileBand band, int query, int key) {
  return query < band.rows && key < band.columns && band.low <= key - query && key - query <= band.high;
}
