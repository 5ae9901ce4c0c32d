// SPDX-License-Identifier: Apache-2.0
// Tiles of vk_tiled in f32: an invocation has OWN rows by four columns of the scores, ROW_THREADS x COLUMN_THREADS
// invocations have a tile. Operands are in shared memory. The plan chooses the tile and counts its shared memory
// (TileShape in vulkan/plan.hpp). Included by the kernels of vk_tiled. docs/vulkan.md, "Rungs".
#define OWN_WORKGROUPS
#include "common.glsl"

layout(local_size_x_id = 3) in;
layout(constant_id = 4) const int ROW_THREADS = 8;
layout(constant_id = 5) const int COLUMN_THREADS = 8;
layout(constant_id = 6) const int OWN = 4;     // 4 or 8
layout(constant_id = 7) const int DEPTH = 64;  // dims of rows and columns at a time: 64, or 32, which takes less memory
layout(constant_id = 8) const int PATCH = 8;   // 32 neighbours have a patch of the tile, so many of them side by side
layout(constant_id = 9) const int TILE_QUADS = 1088;
layout(constant_id = 10) const bool PLAIN = false;   // operands are known to be f32 in whole quads of 16 bytes
layout(constant_id = 11) const bool OPTIONS = true;  // scores may have options
layout(constant_id = 12) const int CHUNK = 64;       // dims of sums and values at a time: 64 or 128
const int VALUES = 2048 / CHUNK;                     // columns of values at a time
const int THREADS = ROW_THREADS * COLUMN_THREADS, ROWS = OWN * ROW_THREADS, COLS = 4 * COLUMN_THREADS;

// Operands are [row][dim] in quads of dims; rows begin in different banks. Weights are [column][row] in quads of rows.
const int DEPTH_QUADS = DEPTH / 4, PITCH = DEPTH_QUADS + 1, CHUNK_QUADS = CHUNK / 4, CHUNK_PITCH = CHUNK_QUADS + 1;
const int WEIGHT_PITCH = ROWS / 4 + 1, OWN_QUADS = CHUNK_QUADS / COLUMN_THREADS;
// Rows, then columns. Weights take the place of columns where those are long enough, so that rows of one chunk can
// stay; else that of both. At the end outputs are here.
const bool STAY = PITCH >= WEIGHT_PITCH;
const int COLUMNS_AT = ROWS * PITCH, WEIGHTS_AT = STAY ? COLUMNS_AT : 0;
shared vec4 tile[TILE_QUADS];
shared vec4 values[32 * 17];
#define TILE_WORD(at) tile[(at) >> 2][(at) & 3]

#include "operands.glsl"

// A GPU's tile, as against that of processors, whose caches read ahead themselves and whose registers are memory.
const bool EARLY = THREADS > 64;

// In a GPU's patch that is 8 wide neighbours alternate between two rows: NVIDIA's read 16 bytes for 16 invocations at
// once where either every first or every second neighbour wants the same ones.
const int LANE_ROWS = EARLY && PATCH == 8 ? 2 : 1;
int row_thread() {
  const int lane = invocation() % 32;
  return invocation() / 32 / (COLUMN_THREADS / PATCH) * (32 / PATCH) + lane / (PATCH * LANE_ROWS) * LANE_ROWS +
         lane % LANE_ROWS;
}
int column_thread() {
  return invocation() / 32 % (COLUMN_THREADS / PATCH) * PATCH + invocation() % 32 / LANE_ROWS % PATCH;
}
// Four rows next to each other, and four far away: so those of neighbours begin in different banks.
int own_row(int r) { return (r / 4 * ROW_THREADS + row_thread()) * 4 + r % 4; }
int own_column(int c) { return column_thread() + COLUMN_THREADS * c; }
int own_quad(int n) { return column_thread() + COLUMN_THREADS * n; }

HeadScores head_of(Question x, Launch launch, int b, int h, int bias_kind) {
  HeadScores head = head_scores(x, launch, b, h, bias_kind);
  if (!OPTIONS) head.options = ScoreOptions(false, false, false, false, false);
  return head;
}

// --- operands: f32 in whole quads is read early, while what was before is multiplied; all else when it is needed

bool is_plain(Rows rows) {
  if (PLAIN || !EARLY) return EARLY;
  return rows.kind == 0 && (rows.width & 3) == 0 && ((rows.first | uint64_t(rows.distance)) & 15ul) == 0ul;
}
vec4 quad_of(Rows rows, int row, int d) {
  if (!counts(rows, row)) return vec4(0);
  return quad_at(rows.first + uint64_t(row * rows.distance), d, rows.width, rows.kind);
}

const int ROW_AHEAD = ROWS * DEPTH_QUADS / THREADS, COLUMN_AHEAD = COLS * DEPTH_QUADS / THREADS;
const int VALUE_AHEAD = VALUES * CHUNK_QUADS / THREADS;
const int SCORE_AHEAD = ROW_AHEAD + COLUMN_AHEAD;
vec4 ahead[SCORE_AHEAD > VALUE_AHEAD ? SCORE_AHEAD : VALUE_AHEAD];

// Which queries are blind is known when operands arrive, not when they are read. An invocation's quads are as many
// rows apart as all invocations fill.
#define OPERAND(read, put_plain, COUNT, WIDE, FIRST, array, AT, ROW_PITCH)                               \
  void read(Rows rows, int row0, int d0) {                                                               \
    if (!is_plain(rows)) return;                                                                         \
    const int row = row0 + invocation() / WIDE, d = d0 + invocation() % WIDE * 4, step = THREADS / WIDE; \
    const int left = d < rows.width ? rows.count - row : 0;                                              \
    const uint64_t at = rows.first + uint64_t(row * rows.distance) + uint64_t(d * 4);                    \
    const uint64_t further = uint64_t(step * rows.distance);                                             \
    [[unroll]] for (int n = 0; n < COUNT; ++n) {                                                         \
      ahead[FIRST + n] = vec4(0);                                                                        \
      if (n * step < left) ahead[FIRST + n] = uintBitsToFloat(FourWords(at + n * further).words);        \
    }                                                                                                    \
  }                                                                                                      \
  void put_plain(Rows rows, int row0) {                                                                  \
    const int row = invocation() / WIDE, first = AT + row * ROW_PITCH + invocation() % WIDE;             \
    const int step = THREADS / WIDE;                                                                     \
    [[unroll]] for (int n = 0; n < COUNT; ++n)                                                           \
      array[first + n * step * ROW_PITCH] =                                                              \
          rows.queries && query_lse[row0 + row + n * step] >= blind ? vec4(0) : ahead[FIRST + n];        \
  }
OPERAND(read_rows, put_plain_rows, ROW_AHEAD, DEPTH_QUADS, 0, tile, 0, PITCH)
OPERAND(read_columns, put_plain_columns, COLUMN_AHEAD, DEPTH_QUADS, ROW_AHEAD, tile, COLUMNS_AT, PITCH)
OPERAND(read_values, put_plain_values, VALUE_AHEAD, CHUNK_QUADS, 0, values, 0, CHUNK_PITCH)

// Dims from d0 on; the rows' only where they are not there already. One loop for both, since it is long where types and
// edges are looked at.
void put_operands(Rows rows, bool there, Rows columns, int d0) {
  const bool rows_wait = !there && !is_plain(rows), columns_wait = !is_plain(columns);
  if (!there && !rows_wait) put_plain_rows(rows, 0);
  if (!columns_wait) put_plain_columns(columns, 0);
  if (!rows_wait && !columns_wait) return;
  [[dont_unroll]] for (int n = rows_wait ? 0 : ROW_AHEAD; n < (columns_wait ? SCORE_AHEAD : ROW_AHEAD); ++n) {
    const int at = invocation() + n * THREADS, row = at / DEPTH_QUADS, d = at % DEPTH_QUADS;
    Rows from = rows;
    if (n >= ROW_AHEAD) from = columns;
    tile[row * PITCH + d] = quad_of(from, row - (n < ROW_AHEAD ? 0 : ROWS), d0 + d * 4);
  }
}

void put_values(Rows rows, int row0, int d0) {
  if (is_plain(rows)) {
    put_plain_values(rows, row0);
    return;
  }
  [[dont_unroll]] for (int n = 0; n < VALUE_AHEAD; ++n) {
    const int at = invocation() + n * THREADS;
    values[at / CHUNK_QUADS * CHUNK_PITCH + at % CHUNK_QUADS] =
        quad_of(rows, row0 + at / CHUNK_QUADS, d0 + at % CHUNK_QUADS * 4);
  }
}

// The rows of the next tile, of which `left` exist.
void advance(inout Rows rows, int64_t left) {
  rows.first += uint64_t(COLS * rows.distance);
  rows.count = int(clamped(left, 0, COLS));
}

// --- products

// What a turn of the innermost loops takes, as text: enough to hide a load, few enough to stay in an instruction cache.
const int TURN_QUADS = EARLY ? 2 : 1, TURN_VALUES = EARLY ? 8 : 1;
const int SCORES = OWN * 4;  // number n of an invocation is in row n / 4 and column n % 4 of its own

// S += rows . columns^T of what lies there, the invocation's part. Sums of as many terms first, which round less.
// Beyond `width` there are zeros.
void multiply(int width, inout float S[SCORES]) {
  const int end = min(DEPTH_QUADS, (width + 3) / 4);
  float sum[SCORES];
  [[unroll]] for (int n = 0; n < SCORES; ++n) sum[n] = 0.0;
  [[dont_unroll]] for (int q0 = 0; q0 < end; q0 += TURN_QUADS)
    [[unroll]] for (int q = 0; q < TURN_QUADS; ++q) {
      vec4 b[4];
      [[unroll]] for (int c = 0; c < 4; ++c) b[c] = tile[COLUMNS_AT + own_column(c) * PITCH + q0 + q];
      [[unroll]] for (int r = 0; r < OWN; ++r) {  // a row at a time: fewer registers
        const vec4 a = tile[own_row(r) * PITCH + q0 + q];
        [[unroll]] for (int d = 0; d < 4; ++d)
          [[unroll]] for (int c = 0; c < 4; ++c) sum[r * 4 + c] = fma(a[d], b[c][d], sum[r * 4 + c]);
      }
    }
  [[unroll]] for (int n = 0; n < SCORES; ++n) S[n] += sum[n];
}

// Where the invocation's weights of its column c lie: those of four rows, and of the r-th row on.
int own_weights(int c, int r) {
  return WEIGHTS_AT + own_column(c) * WEIGHT_PITCH + r / 4 * ROW_THREADS + row_thread();
}
int own_place(int n) { return own_weights(n % 4, n / 4) * 4 + n / 4 % 4; }  // of number n, a word

// Everybody must be done with what was in the tile.
void put_weights(float S[SCORES]) {
  [[unroll]] for (int c = 0; c < 4; ++c)
    [[unroll]] for (int r = 0; r < OWN; r += 4)
      tile[own_weights(c, r)] = vec4(S[r * 4 + c], S[r * 4 + 4 + c], S[r * 4 + 8 + c], S[r * 4 + 12 + c]);
}

const int SUMS = OWN * OWN_QUADS * 4;  // of a chunk: rows, quads of dims

// part += weights . values of what lies there, whose first column is `column0` of the tile. A tile has its own sums,
// which round less: equal terms, of a broadcast V, all round the same way.
void add_weighted(int column0, inout float part[SUMS]) {
  [[dont_unroll]] for (int j0 = 0; j0 < VALUES; j0 += TURN_VALUES)
    [[unroll]] for (int j = 0; j < TURN_VALUES; ++j) {
      vec4 a[OWN / 4];
      [[unroll]] for (int r = 0; r < OWN / 4; ++r)
        a[r] = tile[WEIGHTS_AT + (column0 + j0 + j) * WEIGHT_PITCH + r * ROW_THREADS + row_thread()];
      [[unroll]] for (int n = 0; n < OWN_QUADS; ++n) {
        const vec4 b = values[(j0 + j) * CHUNK_PITCH + own_quad(n)];
        [[unroll]] for (int r = 0; r < OWN; ++r)
          [[unroll]] for (int d = 0; d < 4; ++d) {
            const int at = (r * OWN_QUADS + n) * 4 + d;
            part[at] = fma(a[r / 4][r % 4], b[d], part[at]);
          }
      }
    }
}

// A chunk of an output, times a factor, to the rows that exist. It goes through shared memory, 64 dims at a time, so
// that neighbours write neighbours.
const int OUT_DIMS = 64, OUT_PITCH = OUT_DIMS / 4 + 1, OUT_QUADS = OUT_DIMS / 4 / COLUMN_THREADS;
void store_sums(Rows rows, int d0, float sum[SUMS], float factor, bool accumulate) {
  [[unroll]] for (int n0 = 0; n0 < OWN_QUADS; n0 += OUT_QUADS) {
    const int first_d = d0 + n0 * COLUMN_THREADS * 4;
    barrier();
    [[unroll]] for (int r = 0; r < OWN; ++r)
      [[unroll]] for (int n = 0; n < OUT_QUADS; ++n) {
        const int at = (r * OWN_QUADS + n0 + n) * 4;
        tile[own_row(r) * OUT_PITCH + own_quad(n)] = vec4(sum[at], sum[at + 1], sum[at + 2], sum[at + 3]) * factor;
      }
    barrier();
    for (int n = invocation(); n < ROWS * OUT_DIMS / 4; n += THREADS) {
      const int row = n / (OUT_DIMS / 4), d = n % (OUT_DIMS / 4) * 4;
      if (row >= rows.count) break;
      const uint64_t first = rows.first + uint64_t(row * rows.distance);
      vec4 x = tile[row * OUT_PITCH + d / 4];
      if (accumulate) x += quad_at(first, first_d + d, rows.width, rows.kind);
      put_quad(first, first_d + d, rows.width, rows.kind, x);
    }
  }
}
