// SPDX-License-Identifier: Apache-2.0
// Products of tiles in f32: 32 rows by 32 columns, 64 invocations that have 4 x 4 of it each, operands in shared memory,
// 64 dims at a time. 24 KiB of shared memory: every device has 32, nearly. Included by the kernels of vk_tiled.
// docs/vulkan.md, "vk_tiled".
const int ROWS = 32, COLS = 32, CHUNK = 64;

shared float row_operand[CHUNK * ROWS];     // [dim][row]
shared float column_operand[CHUNK * COLS];  // [dim][column]; or, for the second product, [column][dim]
shared float weights[COLS * ROWS];          // [column][row]: P
shared float gradients[COLS * ROWS];        // [column][row]: dS
shared float partial[ROWS * 8];             // of reductions over a row

#include "operands.glsl"

int own_row(int r) { return invocation() / 8 * 4 + r; }
int own_column(int c) { return invocation() % 8 * 4 + c; }

vec4 operand(Rows rows, int row, int d) {
  if (!counts(rows, row)) return vec4(0);
  return quad_at(rows.first + uint64_t(row * rows.distance), d, rows.width, rows.kind);
}

#define LOAD_TRANSPOSED(name, array)                                             \
  void name(Rows rows, int d0) {                                                 \
    for (int n = invocation(); n < 32 * CHUNK / 4; n += THREADS) {               \
      const int row = n % 32, d = n / 32 * 4;                                    \
      if (d0 + d >= rows.width) break;                                           \
      const vec4 x = operand(rows, row, d0 + d);                                 \
      array[(d + 0) * 32 + row] = x.x, array[(d + 1) * 32 + row] = x.y;          \
      array[(d + 2) * 32 + row] = x.z, array[(d + 3) * 32 + row] = x.w;          \
    }                                                                            \
  }
LOAD_TRANSPOSED(load_rows, row_operand)
LOAD_TRANSPOSED(load_columns, column_operand)

void load_plain(Rows rows, int d0) {
  for (int n = invocation(); n < 32 * CHUNK / 4; n += THREADS) {
    const int row = n / (CHUNK / 4), d = n % (CHUNK / 4) * 4;
    const vec4 x = operand(rows, row, d0 + d);
    column_operand[row * CHUNK + d] = x.x, column_operand[row * CHUNK + d + 1] = x.y;
    column_operand[row * CHUNK + d + 2] = x.z, column_operand[row * CHUNK + d + 3] = x.w;
  }
}

// S = rows . columns^T, the thread's 16 of it. `loaded`: row_operand holds the rows already, in one chunk.
void multiply(Rows rows, Rows columns, bool loaded, out float S[16]) {
  [[unroll]] for (int n = 0; n < 16; ++n) S[n] = 0.0;
  for (int d0 = 0; d0 < rows.width; d0 += CHUNK) {
    barrier();  // everybody is done with what was there
    if (!loaded) load_rows(rows, d0);
    load_columns(columns, d0);
    barrier();
    const int end = min(CHUNK, (rows.width - d0 + 3) / 4 * 4);
    for (int d1 = 0; d1 < end; d1 += 16) {  // sums of 16 terms first, which round less
      float sum[16];
      [[unroll]] for (int n = 0; n < 16; ++n) sum[n] = 0.0;
      for (int d = d1; d < min(d1 + 16, end); ++d) {
        float a[4], b[4];
        [[unroll]] for (int n = 0; n < 4; ++n) {
          a[n] = row_operand[d * 32 + own_row(n)];
          b[n] = column_operand[d * 32 + own_column(n)];
        }
        [[unroll]] for (int n = 0; n < 16; ++n) sum[n] = fma(a[n / 4], b[n % 4], sum[n]);
      }
      [[unroll]] for (int n = 0; n < 16; ++n) S[n] += sum[n];
    }
  }
}

// Where the invocation's number n of a tile lies in weights and gradients.
int own_place(int n) { return own_column(n % 4) * ROWS + own_row(n / 4); }

// sum += tile . columns, for dims d0 to d0 + 63: the thread has 4 rows, and of the dims 4 t to 4 t + 3, both halves.
// The tile is in weights or in gradients, whole: a barrier is in here. Sums of 16 terms first, which round less: equal
// terms, of a broadcast V, all round the same way.
#define ADD_PRODUCT(name, tile)                                                                     \
  void name(Rows columns, int d0, inout float sum[32]) {                                            \
    barrier();                                                                                      \
    load_plain(columns, d0);                                                                        \
    barrier();                                                                                      \
    for (int j1 = 0; j1 < COLS; j1 += 16) {                                                         \
      float part[32];                                                                               \
      [[unroll]] for (int n = 0; n < 32; ++n) part[n] = 0.0;                                        \
      for (int j = j1; j < j1 + 16; ++j) {                                                          \
        float a[4], b[8];                                                                           \
        [[unroll]] for (int n = 0; n < 4; ++n) a[n] = tile[j * ROWS + own_row(n)];                  \
        [[unroll]] for (int n = 0; n < 8; ++n)                                                      \
          b[n] = column_operand[j * CHUNK + n / 4 * 32 + own_column(n % 4)];                        \
        [[unroll]] for (int n = 0; n < 32; ++n) part[n] = fma(a[n / 8], b[n % 8], part[n]);         \
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
  [[unroll]] for (int n = 0; n < 32; ++n)
    column_operand[own_row(n / 8) * CHUNK + n % 8 / 4 * 32 + own_column(n % 4)] = sum[n] * factor;
  barrier();
  for (int n = invocation(); n < 32 * CHUNK / 4; n += THREADS) {
    const int row = n / (CHUNK / 4), d = n % (CHUNK / 4) * 4, at = row * CHUNK + d;
    if (row >= rows.count) break;
    const uint64_t first = rows.first + uint64_t(row * rows.distance);
    vec4 x = vec4(column_operand[at], column_operand[at + 1], column_operand[at + 2], column_operand[at + 3]);
    if (accumulate) x += quad_at(first, d0 + d, rows.width, rows.kind);
    put_quad(first, d0 + d, rows.width, rows.kind, x);
  }
}
