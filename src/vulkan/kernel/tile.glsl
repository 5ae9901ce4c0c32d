// SPDX-License-Identifier: Apache-2.0
// Products of tiles in f32: 32 rows by 32 columns, 64 invocations that have 4 x 4 of it each, operands in shared
// memory, 64 dims at a time. 26 KiB of shared memory: nearly every device has 32. Included by the backward kernels of
// vk_tiled. docs/vulkan.md, "Rungs".
const int ROWS = 32, COLS = 32, CHUNK = 64;

// Operands are [row][dim], read four dims at a time; a row is 17 such quads long, so that rows begin in different banks.
const int QUADS = CHUNK / 4, ROW_QUADS = QUADS + 1;
shared vec4 row_operand[ROWS * ROW_QUADS], column_operand[COLS * ROW_QUADS];
shared float weights[COLS * ROWS];          // [column][row]: P
shared float gradients[COLS * ROWS];        // [column][row]: dS

#include "operands.glsl"

int own_row(int r) { return invocation() / 8 + 8 * r; }
int own_column(int c) { return invocation() % 8 + 8 * c; }

vec4 operand(Rows rows, int row, int d) {
  if (!counts(rows, row)) return vec4(0);
  return quad_at(rows.first + uint64_t(row * rows.distance), d, rows.width, rows.kind);
}

#define LOAD(name, array)                                                      \
  void name(Rows rows, int d0) {                                               \
    const int quads = min(QUADS, (rows.width - d0 + 3) / 4);                   \
    for (int n = invocation(); n < 32 * quads; n += THREADS)                   \
      array[n / quads * ROW_QUADS + n % quads] = operand(rows, n / quads, d0 + n % quads * 4); \
  }
LOAD(load_rows, row_operand)
LOAD(load_columns, column_operand)

// S = rows . columns^T, the thread's 16 of it.
void multiply(Rows rows, Rows columns, out float S[16]) {
  [[unroll]] for (int n = 0; n < 16; ++n) S[n] = 0.0;
  for (int d0 = 0; d0 < rows.width; d0 += CHUNK) {
    barrier();  // everybody is done with what was there
    load_rows(rows, d0);
    load_columns(columns, d0);
    barrier();
    const int end = min(QUADS, (rows.width - d0 + 3) / 4);
    for (int q1 = 0; q1 < end; q1 += 4) {  // sums of 16 terms first, which round less
      float sum[16];
      [[unroll]] for (int n = 0; n < 16; ++n) sum[n] = 0.0;
      for (int q = q1; q < min(q1 + 4, end); ++q) {
        vec4 a[4];
        [[unroll]] for (int n = 0; n < 4; ++n) a[n] = row_operand[own_row(n) * ROW_QUADS + q];
        [[unroll]] for (int c = 0; c < 4; ++c) {  // a column at a time: fewer registers
          const vec4 b = column_operand[own_column(c) * ROW_QUADS + q];
          [[unroll]] for (int d = 0; d < 4; ++d)
            [[unroll]] for (int r = 0; r < 4; ++r) sum[r * 4 + c] = fma(a[r][d], b[d], sum[r * 4 + c]);
        }
      }
      [[unroll]] for (int n = 0; n < 16; ++n) S[n] += sum[n];
    }
  }
}

int own_quad(int n) { return invocation() % 8 + 8 * n; }

// Where the invocation's number n of a tile lies in weights and gradients.
int own_place(int n) { return own_column(n % 4) * ROWS + own_row(n / 4); }

// sum += tile . columns, for dims d0 to d0 + 63: the thread has 4 rows, and of the quads of dims t % 8 and t % 8 + 8.
// The tile is in weights or in gradients, whole: a barrier is in here. Sums of 16 terms first, which round less: equal
// terms, of a broadcast V, all round the same way.
#define ADD_PRODUCT(name, tile)                                                                     \
  void name(Rows columns, int d0, inout float sum[32]) {                                            \
    barrier();                                                                                      \
    load_columns(columns, d0);                                                                      \
    barrier();                                                                                      \
    for (int j1 = 0; j1 < COLS; j1 += 16) {                                                         \
      float part[32];                                                                               \
      [[unroll]] for (int n = 0; n < 32; ++n) part[n] = 0.0;                                        \
      for (int j = j1; j < j1 + 16; ++j) {                                                          \
        float a[4];                                                                                 \
        vec4 b[2];                                                                                  \
        [[unroll]] for (int n = 0; n < 4; ++n) a[n] = tile[j * ROWS + own_row(n)];                  \
        [[unroll]] for (int n = 0; n < 2; ++n) b[n] = column_operand[j * ROW_QUADS + own_quad(n)];  \
        [[unroll]] for (int n = 0; n < 32; ++n) part[n] = fma(a[n / 8], b[n / 4 % 2][n % 4], part[n]); \
      }                                                                                             \
      [[unroll]] for (int n = 0; n < 32; ++n) sum[n] += part[n];                                    \
    }                                                                                               \
  }
ADD_PRODUCT(add_weighted, weights)
ADD_PRODUCT(add_gradient, gradients)

// The invocation's part of an output, times a factor, to the rows that exist. It goes through shared memory, so that
// neighbours write neighbours.
void store_sums(Rows rows, int d0, float sum[32], float factor, bool accumulate) {
  barrier();
  [[unroll]] for (int n = 0; n < 32; n += 4)
    column_operand[own_row(n / 8) * ROW_QUADS + own_quad(n / 4 % 2)] =
        vec4(sum[n], sum[n + 1], sum[n + 2], sum[n + 3]) * factor;
  barrier();
  for (int n = invocation(); n < 32 * CHUNK / 4; n += THREADS) {
    const int row = n / QUADS, d = n % QUADS * 4;
    if (row >= rows.count) break;
    const uint64_t first = rows.first + uint64_t(row * rows.distance);
    vec4 x = column_operand[row * ROW_QUADS + d / 4];
    if (accumulate) x += quad_at(first, d0 + d, rows.width, rows.kind);
    put_quad(first, d0 + d, rows.width, rows.kind, x);
  }
}
