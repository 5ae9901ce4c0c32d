// SPDX-License-Identifier: Apache-2.0
// Forward pass of vk_tiled: a workgroup has 32, 64 or 128 queries of one head, and goes through its keys 32 or 64 at a
// time with a running maximum and a compensated sum (online softmax). The tile is made of constants: an invocation has
// OWN rows by four columns of the scores, and ROW_THREADS x COLUMN_THREADS of them a tile.
// Implements docs/algorithm.md, "Online softmax"; docs/vulkan.md, "Rungs".
#version 460
#extension GL_GOOGLE_include_directive : require
#define OWN_WORKGROUPS
#include "common.glsl"

layout(local_size_x_id = 3) in;
layout(constant_id = 0) const int V_CHUNKS = 1;  // of Dv, 64 each
layout(constant_id = 4) const int ROW_THREADS = 8;
layout(constant_id = 5) const int COLUMN_THREADS = 8;
layout(constant_id = 6) const int OWN = 4;     // 4 or 8
layout(constant_id = 7) const int DEPTH = 64;  // dims of queries and keys at a time: 64, or 32, which takes less memory
const int THREADS = ROW_THREADS * COLUMN_THREADS, ROWS = OWN * ROW_THREADS, COLS = 4 * COLUMN_THREADS;
const int CHUNK = 64, VALUES = 32;  // values at a time: so many keys, 64 dims

// Operands are [row][dim] in quads of dims; rows begin in different banks. Weights are [column][row] in quads of rows.
const int DEPTH_QUADS = DEPTH / 4, PITCH = DEPTH_QUADS + 1, CHUNK_QUADS = CHUNK / 4, CHUNK_PITCH = CHUNK_QUADS + 1;
const int WEIGHT_PITCH = ROWS / 4 + 1, OWN_QUADS = CHUNK_QUADS / COLUMN_THREADS;
// Queries, then keys. Weights take the place of keys where those are long enough, so that queries of one chunk stay;
// else that of both. At the end outputs are here.
const bool STAY = PITCH >= WEIGHT_PITCH;
const int KEYS_AT = ROWS * PITCH, WEIGHTS_AT = STAY ? KEYS_AT : 0;
const int BOTH = (ROWS + COLS) * PITCH, OUTPUTS = ROWS * CHUNK_PITCH, WEIGHTS = COLS * WEIGHT_PITCH;
const int ALONE = OUTPUTS > WEIGHTS ? OUTPUTS : WEIGHTS;
shared vec4 tile[BOTH > ALONE ? BOTH : ALONE];
shared vec4 values[VALUES * CHUNK_PITCH];  // and what a row's invocations have of its maximum and its sum
#define VALUE_WORD(at) values[(at) >> 2][(at) & 3]
#define TILE_WORD(at) tile[(at) >> 2][(at) & 3]

#include "operands.glsl"

layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer Parameters { ForwardBlock block; };
layout(push_constant) uniform Push { uint64_t parameters; };
// The block stays in memory, and a number of it is read where it is used: what were read at once would fill registers
// that tiles need.
#define given Parameters(parameters).block

int row_thread() { return invocation() / COLUMN_THREADS; }
int column_thread() { return invocation() % COLUMN_THREADS; }
int own_row(int r) { return row_thread() * OWN + r; }
int own_column(int c) { return column_thread() + COLUMN_THREADS * c; }
int own_quad(int n) { return column_thread() + COLUMN_THREADS * n; }

// --- operands: f32 in whole quads is read early, while what was before is multiplied; all else when it is needed

bool is_plain(Rows rows) {
  return rows.kind == 0 && (rows.width & 3) == 0 && ((rows.first | uint64_t(rows.distance)) & 15ul) == 0ul;
}
vec4 plain_quad(Rows rows, int row, int d) {
  if (row >= rows.count || d >= rows.width) return vec4(0);
  return uintBitsToFloat(FourWords(rows.first + uint64_t(row * rows.distance) + uint64_t(d * 4)).words);
}
vec4 quad_of(Rows rows, int row, int d) {
  if (row >= rows.count) return vec4(0);
  return quad_at(rows.first + uint64_t(row * rows.distance), d, rows.width, rows.kind);
}

const int QUERY_AHEAD = ROWS * DEPTH_QUADS / THREADS, KEY_AHEAD = COLS * DEPTH_QUADS / THREADS;
const int VALUE_AHEAD = VALUES * CHUNK_QUADS / THREADS;
const int SCORE_AHEAD = QUERY_AHEAD + KEY_AHEAD;
vec4 ahead[SCORE_AHEAD > VALUE_AHEAD ? SCORE_AHEAD : VALUE_AHEAD];

#define OPERAND(read, put, COUNT, WIDE, FIRST, array, AT, ROW_PITCH)                                  \
  void read(Rows rows, int row0, int d0) {                                                            \
    if (is_plain(rows)) [[unroll]] for (int n = 0; n < COUNT; ++n) {                                  \
      const int at = invocation() + n * THREADS;                                                      \
      ahead[FIRST + n] = plain_quad(rows, row0 + at / WIDE, d0 + at % WIDE * 4);                      \
    }                                                                                                 \
  }                                                                                                   \
  void put(Rows rows, int row0, int d0) {                                                             \
    if (is_plain(rows)) {                                                                             \
      [[unroll]] for (int n = 0; n < COUNT; ++n) {                                                    \
        const int at = invocation() + n * THREADS;                                                    \
        array[AT + at / WIDE * ROW_PITCH + at % WIDE] = ahead[FIRST + n];                             \
      }                                                                                               \
    } else {                                                                                          \
      [[dont_unroll]] for (int n = 0; n < COUNT; ++n) {                                               \
        const int at = invocation() + n * THREADS;                                                    \
        array[AT + at / WIDE * ROW_PITCH + at % WIDE] = quad_of(rows, row0 + at / WIDE, d0 + at % WIDE * 4); \
      }                                                                                               \
    }                                                                                                 \
  }
OPERAND(read_queries, put_queries, QUERY_AHEAD, DEPTH_QUADS, 0, tile, 0, PITCH)
OPERAND(read_keys, put_keys, KEY_AHEAD, DEPTH_QUADS, QUERY_AHEAD, tile, KEYS_AT, PITCH)
OPERAND(read_values, put_values, VALUE_AHEAD, CHUNK_QUADS, 0, values, 0, CHUNK_PITCH)

// The rows of the next tile, of which `left` exist.
void advance(inout Rows rows, int64_t left) {
  rows.first += uint64_t(COLS * rows.distance);
  rows.count = int(clamped(left, 0, COLS));
}

// --- products

const int SCORES = OWN * 4;

// S += rows . columns^T of what lies there, the invocation's part. Sums of 16 terms first, which round less.
void multiply(int width, inout float S[SCORES]) {
  const int end = min(DEPTH_QUADS, (width + 3) / 4);
  for (int q1 = 0; q1 < end; q1 += 4) {
    float sum[SCORES];
    [[unroll]] for (int n = 0; n < SCORES; ++n) sum[n] = 0.0;
    for (int q = q1; q < q1 + 4; ++q) {
      vec4 a[OWN];
      [[unroll]] for (int r = 0; r < OWN; ++r) a[r] = tile[own_row(r) * PITCH + q];
      [[unroll]] for (int c = 0; c < 4; ++c) {  // a column at a time: fewer registers
        const vec4 b = tile[KEYS_AT + own_column(c) * PITCH + q];
        [[unroll]] for (int d = 0; d < 4; ++d)
          [[unroll]] for (int r = 0; r < OWN; ++r) sum[r * 4 + c] = fma(a[r][d], b[d], sum[r * 4 + c]);
      }
    }
    [[unroll]] for (int n = 0; n < SCORES; ++n) S[n] += sum[n];
  }
}

// Where the invocation's weights of its column c begin, OWN rows of them.
int own_weights(int c) { return WEIGHTS_AT + own_column(c) * WEIGHT_PITCH + row_thread() * (OWN / 4); }
int own_place(int n) { return own_weights(n % 4) * 4 + n / 4; }  // of number n, a word

const int SUMS = OWN * OWN_QUADS * 4;  // of a chunk: rows, quads of dims

// sum += weights . values of what lies there, whose first key is `key0` of the tile. Sums of 16 terms first, which
// round less: equal terms, of a broadcast V, all round the same way.
void add_weighted(int key0, inout float sum[SUMS]) {
  for (int j1 = 0; j1 < VALUES; j1 += 16) {
    float part[SUMS];
    [[unroll]] for (int n = 0; n < SUMS; ++n) part[n] = 0.0;
    for (int j = j1; j < j1 + 16; ++j) {
      vec4 a[OWN / 4];
      [[unroll]] for (int r = 0; r < OWN / 4; ++r)
        a[r] = tile[WEIGHTS_AT + (key0 + j) * WEIGHT_PITCH + row_thread() * (OWN / 4) + r];
      [[unroll]] for (int n = 0; n < OWN_QUADS; ++n) {
        const vec4 b = values[j * CHUNK_PITCH + own_quad(n)];
        [[unroll]] for (int r = 0; r < OWN; ++r)
          [[unroll]] for (int d = 0; d < 4; ++d) {
            const int at = (r * OWN_QUADS + n) * 4 + d;
            part[at] = fma(a[r / 4][r % 4], b[d], part[at]);
          }
      }
    }
    [[unroll]] for (int n = 0; n < SUMS; ++n) sum[n] += part[n];
  }
}

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
  const int D = given.launch.D, Dv = given.launch.Dv, kind = given.kind.q;
  Place place;
  if (!query_place(given.p.x, given.launch.blocks, ROWS, place)) return;
  const DeviceSequence s = place.s;
  const int64_t i0 = place.first;
  const HeadScores head = head_scores(given.p.x, given.launch, place.b, place.h, given.kind.bias);
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
  read_queries(queries, 0, 0);
  read_keys(key_rows, 0, 0);
  bool loaded = false;
  for (int64_t j0 = first; j0 < keys.end; j0 += COLS) {
    float S[SCORES];
    [[unroll]] for (int n = 0; n < SCORES; ++n) S[n] = 0.0;
    for (int d0 = 0; d0 < D; d0 += DEPTH) {
      barrier();  // everybody is done with what was there
      if (!loaded) put_queries(queries, 0, d0);
      put_keys(key_rows, 0, d0);
      loaded = stay;
      if (d0 + DEPTH < D) {
        read_queries(queries, 0, d0 + DEPTH);
        read_keys(key_rows, 0, d0 + DEPTH);
      } else {
        read_values(value_rows, 0, 0);
      }
      barrier();
      multiply(D - d0, S);
    }
    advance(key_rows, s.nk - j0 - COLS);
    barrier();

    if (!has_options && tile_class(s.mask, own, Range(j0, j0 + COLS)) == TileClass_full) {
      [[unroll]] for (int n = 0; n < SCORES; ++n) S[n] *= head.numbers.factor;
    } else {
      [[unroll]] for (int n = 0; n < SCORES; ++n) TILE_WORD(own_place(n)) = S[n];
      apply_options(head, s, i0, j0);
      [[unroll]] for (int n = 0; n < SCORES; ++n) S[n] = TILE_WORD(own_place(n));
    }
    float share[OWN];
    [[unroll]] for (int r = 0; r < OWN; ++r)
      share[r] = max(max(S[r * 4], S[r * 4 + 1]), max(S[r * 4 + 2], S[r * 4 + 3]));
    put_shares(share);
    barrier();
    [[unroll]] for (int r = 0; r < OWN; ++r) {
      vec4 tops = vec4(m[r]);
      [[unroll]] for (int n = 0; n < COLUMN_THREADS / 4; ++n)
        tops = max(tops, values[own_row(r) * (COLUMN_THREADS / 4) + n]);
      const float top = max(max(tops.x, tops.y), max(tops.z, tops.w)), alpha = exp2_of(m[r] - top);
      m[r] = top;
      float sum = 0.0;
      [[unroll]] for (int c = 0; c < 4; ++c) {
        const int n = r * 4 + c;
        S[n] = S[n] <= hidden ? 0.0 : exp2_of(S[n] - top);
        sum += S[n];
      }
      l[r] *= alpha, lost[r] *= alpha;
      add_compensated(l[r], lost[r], sum);
      [[unroll]] for (int c = 0; c < V_CHUNKS; ++c)
        [[unroll]] for (int n = 0; n < OWN_QUADS * 4; ++n) sums[c][r * OWN_QUADS * 4 + n] *= alpha;
    }
    [[unroll]] for (int c = 0; c < 4; ++c)
      [[unroll]] for (int r = 0; r < OWN; r += 4)
        tile[own_weights(c) + r / 4] = vec4(S[r * 4 + c], S[r * 4 + 4 + c], S[r * 4 + 8 + c], S[r * 4 + 12 + c]);
    if (head.options.dropout) apply_dropout(head, i0, j0);

    [[unroll]] for (int c = 0; c < V_CHUNKS; ++c)
      if (c * CHUNK < Dv)
        for (int key0 = 0; key0 < COLS; key0 += VALUES) {
          barrier();
          put_values(value_rows, key0, c * CHUNK);
          if (key0 + VALUES < COLS) {
            read_values(value_rows, key0 + VALUES, c * CHUNK);
          } else if ((c + 1) * CHUNK < Dv) {
            read_values(value_rows, 0, (c + 1) * CHUNK);
          } else {
            if (!stay) read_queries(queries, 0, 0);
            read_keys(key_rows, 0, 0);
          }
          barrier();
          add_weighted(key0, sums[c]);
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
  // Through shared memory, so that neighbours write neighbours.
  const Rows out_rows = rows_at(given.p.o, place.b, s.q_begin + i0, place.h, s.nq - i0, Dv, given.kind.o, false);
  [[unroll]] for (int c = 0; c < V_CHUNKS; ++c) {
    barrier();
    [[unroll]] for (int r = 0; r < OWN; ++r)
      [[unroll]] for (int n = 0; n < OWN_QUADS; ++n) {
        const int at = (r * OWN_QUADS + n) * 4;
        tile[own_row(r) * CHUNK_PITCH + own_quad(n)] =
            vec4(sums[c][at], sums[c][at + 1], sums[c][at + 2], sums[c][at + 3]);
      }
    barrier();
    for (int n = invocation(); n < ROWS * CHUNK_QUADS; n += THREADS) {
      const int row = n / CHUNK_QUADS, d = n % CHUNK_QUADS * 4;
      if (row >= out_rows.count) break;
      put_quad(out_rows.first + uint64_t(row * out_rows.distance), c * CHUNK + d, Dv, out_rows.kind,
               tile[row * CHUNK_PITCH + d / 4]);
    }
  }
}
