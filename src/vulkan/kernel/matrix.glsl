// SPDX-License-Identifier: Apache-2.0
// Tiles of vk_matrix: 32 or 64 columns, and 16 rows for each subgroup, a strip. Columns lie in shared memory for all,
// two turns of them, so that one barrier a turn is enough. A strip's numbers are its subgroup's alone: which invocation
// has which element of a cooperative matrix is nobody's to know, so scores go through shared memory. 28 or 37 KiB.
// Included by the kernels of vk_matrix. docs/vulkan.md, "vk_matrix".
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#extension GL_KHR_shader_subgroup_vote : require
layout(local_size_x_id = 3) in;
layout(constant_id = 4) const int M = 16;  // the shape of a product, M x N x K, one of those that the device lists
layout(constant_id = 5) const int N = 16;
layout(constant_id = 6) const int K = 16;
layout(constant_id = 10) const bool LOCKSTEP = false;  // a subgroup's invocations run as one: llvmpipe
layout(constant_id = 11) const int OPERANDS = 1;  // their kind: 1 f16, 2 bf16
layout(constant_id = 12) const bool WIDE_TILE = false;  // 64 columns
const int THREADS = int(gl_WorkGroupSize.x), SUBGROUPS = 8, LANES = THREADS / SUBGROUPS;
const int STRIP = 16, ROWS = STRIP * SUBGROUPS, COLS = WIDE_TILE ? 64 : 32, CHUNK = 64;
const int HALF = 32, HALVES = COLS / HALF;  // scores go through shared memory so many columns at a time

// Of a row in shared memory, in words: 64 elements of 16 bits or 32 of f32, and 16 bytes that keep rows in other banks.
// Four words are one element, so that all know that matrices begin at multiples of 16 bytes.
const int PITCH = 36;
shared uvec4 columns[2 * COLS * PITCH / 4];
shared uvec4 strips[ROWS * PITCH / 4];  // an area of every subgroup
#define STRIP_WORD(at) strips[(at) >> 2][(at) & 3]
#define COLUMN_WORD(at) columns[(at) >> 2][(at) & 3]

#define OWN_WORKGROUPS
#include "common.glsl"
#ifdef EMULATED_MATRICES
#include "emulated_matrices.glsl"
#else
#include "matrices.glsl"
#endif
#include "operands.glsl"

// Matrices of a strip: above each other, and along scores, along a chunk of dims, along the columns as depth.
const int BANDS = STRIP / M, ACROSS = COLS / N, DEPTH = CHUNK / K, WIDE = CHUNK / N, DEEP = COLS / K;
const int SCORES = BANDS * ACROSS, WEIGHTS = BANDS * DEEP, HALF_ACROSS = HALF / N;
// Of the invocations of a strip: how many share a row, and the rows of each.
const int LANES_PER_ROW = LANES > STRIP ? LANES / STRIP : 1, OWN_ROWS = LANES > STRIP ? 1 : STRIP / LANES;

int lane() { return int(gl_SubgroupInvocationID); }
int strip_row() { return int(gl_SubgroupID) * STRIP; }  // of the tile
int area() { return strip_row() * PITCH; }
int own_row(int r) { return lane() / LANES_PER_ROW * OWN_ROWS + r; }

// What a subgroup wrote to its areas, it may read. llvmpipe takes a barrier of subgroups for one of the workgroup,
// which not all subgroups reach; it runs them in lockstep, so that memory's order is all they need.
void strip_barrier() {
  if (LOCKSTEP)
    subgroupMemoryBarrierShared();
  else
    subgroupBarrier();
}

// --- operands

// Elements d to d + 7 of a row, as they are in memory: 16 bits each.
uvec4 eight_at(Rows rows, int row, int d) {
  if (d >= rows.width || !counts(rows, row)) return uvec4(0);
  const uint64_t at = rows.first + uint64_t(row * rows.distance) + uint64_t(d) * 2ul;
  if (d + 7 < rows.width && (at & 15ul) == 0ul) return FourWords(at).words;
  uint word[4];
  UNROLLED for (int n = 0; n < 4; ++n) {
    word[n] = d + 2 * n < rows.width ? half_at(at + 4 * n) : 0u;
    if (d + 2 * n + 1 < rows.width) word[n] |= half_at(at + 4 * n + 2) << 16;
  }
  return uvec4(word[0], word[1], word[2], word[3]);
}

// Whose turn it is, in `columns`. What was there two turns ago is read no more: there was a barrier since.
int turn = 0;

// 64 dims of the columns' operand on their way: read from memory before they are needed, while others are multiplied.
const int AHEAD = COLS * 8 > THREADS ? COLS * 8 / THREADS : 1;
uvec4 ahead[AHEAD];

void read_ahead(Rows rows, int d0) {
  rows.queries = false;  // which of them are blind is known when they arrive
  UNROLLED for (int n = 0; n < AHEAD; ++n) {
    const int at = invocation() + n * THREADS;
    if (at < COLS * 8) ahead[n] = eight_at(rows, at / 8, d0 + at % 8 * 8);
  }
}

// They arrive, and this is where. A barrier must follow.
int put_columns(bool queries) {
  const int first = turn * COLS * PITCH;
  turn = 1 - turn;
  UNROLLED for (int n = 0; n < AHEAD; ++n) {
    const int at = invocation() + n * THREADS;
    if (at >= COLS * 8) continue;
    columns[(first + at / 8 * PITCH) / 4 + at % 8] = queries && query_lse[at / 8] >= blind ? uvec4(0) : ahead[n];
  }
  return first;
}

// The rows of the next tile, of which `left` exist.
void advance(inout Rows rows, int64_t left) {
  rows.first += uint64_t(COLS * rows.distance);
  rows.count = int(clamped(left, 0, COLS));
}

// 64 dims of the strip's own rows, in one of its areas.
void stage_strip(Rows rows, int d0, int first) {
  strip_barrier();
  for (int n = lane(); n < STRIP * 8; n += LANES) {
    strips[(first + n / 8 * PITCH) / 4 + n % 8] = eight_at(rows, strip_row() + n / 8, d0 + n % 8 * 8);
  }
  strip_barrier();
}

// --- an invocation's own numbers of a strip

// Quads that it has in each of its rows, in each half next to each other, and where in `strips` those of its r-th row
// begin; likewise of weights, of 16 bits, which take half the room.
const int HALF_QUADS = HALF / 4 / LANES_PER_ROW, QUADS = HALVES * HALF_QUADS;
int own_key(int e) {
  return e / (HALF_QUADS * 4) * HALF + lane() % LANES_PER_ROW * HALF_QUADS * 4 + e % (HALF_QUADS * 4);
}
int own_quads(int r) { return ((area() + own_row(r) * PITCH) >> 2) + lane() % LANES_PER_ROW * HALF_QUADS; }
int own_weights(int r, int quad) {
  return ((area() + own_row(r) * PITCH) >> 2) + quad / HALF_QUADS * (HALF / 8) +
         (lane() % LANES_PER_ROW * HALF_QUADS + quad % HALF_QUADS) / 2;
}

// As narrowed(), but in all its cases by selection.
uint bits_of(float x) {
  const uint bits = floatBitsToUint(x), size = bits & 0x7fffffffu;
  if (OPERANDS == 2) return size > 0x7f800000u ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint small = floatBitsToUint(uintBitsToFloat(size) + 0.5) - 0x3f000000u;
  const uint bound = min(size, 0x47800000u);
  const uint large = (bound + 0xfffu + ((bound >> 13) & 1u) - 0x38000000u) >> 13;
  const uint rounded = size < 0x38800000u ? small : size > 0x7f800000u ? 0x7e00u : large;
  return ((bits >> 16) & 0x8000u) | rounded;
}
uvec2 four_bits(vec4 x) {
  return uvec2(bits_of(x.x) | (bits_of(x.y) << 16), bits_of(x.z) | (bits_of(x.w) << 16));
}

// --- products

// Functions for an operand of CHUNKS chunks of dims, which are COUNT matrices. `load`: its matrices, where they are
// KEPT, before the first tile. `multiply_chunk`: S += rows . columns^T for 64 dims, whose columns are at `at`; by way of
// an area if rows are not kept. Sums of 64 terms first, which round less.
#define ROW_OPERAND(load_chunk, load, multiply_chunk, CHUNKS, COUNT)                                       \
  void load_chunk(Rows rows, int c, int first, inout LeftMatrix kept[COUNT]) {                                       \
    stage_strip(rows, c * CHUNK, first);                                                                             \
    UNROLLED for (int n = 0; n < BANDS * DEPTH; ++n)                                                                 \
      LOAD_LEFT(kept[(KEPT ? c * BANDS * DEPTH : 0) + n], first + n / DEPTH * M * PITCH + n % DEPTH * (K / 2));      \
  }                                                                                                                  \
  void load(Rows rows, int first, inout LeftMatrix kept[COUNT]) {                                                    \
    if (KEPT) UNROLLED for (int c = 0; c < CHUNKS; ++c) load_chunk(rows, c, first, kept);                            \
  }                                                                                                                  \
  void multiply_chunk(Rows rows, int c, int at, int first, inout LeftMatrix kept[COUNT], inout SumMatrix S[SCORES]) { \
    if (!KEPT) load_chunk(rows, c, first, kept);                                                                     \
    UNROLLED for (int n = 0; n < ACROSS; ++n) {                                                                      \
      SumMatrix part[BANDS];                                                                                         \
      UNROLLED for (int b = 0; b < BANDS; ++b) part[b] = ZERO_SUM;                                                   \
      UNROLLED for (int k = 0; k < DEPTH; ++k) {                                                                     \
        RightMatrix right;                                                                                           \
        LOAD_RIGHT(right, at + n * N * PITCH + k * (K / 2), COLUMNS_DOWN);                                           \
        UNROLLED for (int b = 0; b < BANDS; ++b)                                                                     \
          part[b] = MULTIPLY_ADD(kept[((KEPT ? c : 0) * BANDS + b) * DEPTH + k], right, part[b]);                    \
      }                                                                                                              \
      UNROLLED for (int b = 0; b < BANDS; ++b) S[b * ACROSS + n] = ADDED(S[b * ACROSS + n], part[b]);                \
    }                                                                                                                \
  }

// An area of the strip takes half of its scores, row after row.
void store_scores(inout SumMatrix S[SCORES], int half_tile, int first) {
  strip_barrier();
  UNROLLED for (int n = 0; n < BANDS * HALF_ACROSS; ++n)
    STORE_SUM(S[n / HALF_ACROSS * ACROSS + half_tile * HALF_ACROSS + n % HALF_ACROSS],
              first + n / HALF_ACROSS * M * PITCH + n % HALF_ACROSS * N);
  strip_barrier();
}

// Weights of the strip's rows, in 16 bits, as matrices.
void load_weights(int first, inout LeftMatrix weights[WEIGHTS]) {
  UNROLLED for (int n = 0; n < WEIGHTS; ++n)
    LOAD_LEFT(weights[n], first + n / DEEP * M * PITCH + n % DEEP * (K / 2));
}

// Chunk c of sums += weights . columns. Sums of a tile's terms first, which round less: equal terms, of a broadcast V,
// all round the same way.
#define ADD_WEIGHTED(name, COUNT)                                                                                    \
  void name(inout LeftMatrix weights[WEIGHTS], int at, int c, inout SumMatrix sums[COUNT]) {                         \
    UNROLLED for (int n = 0; n < WIDE; ++n) {                                                                        \
      SumMatrix part[BANDS];                                                                                         \
      UNROLLED for (int b = 0; b < BANDS; ++b) part[b] = ZERO_SUM;                                                   \
      UNROLLED for (int k = 0; k < DEEP; ++k) {                                                                      \
        RightMatrix right;                                                                                           \
        LOAD_RIGHT(right, at + k * K * PITCH + n * (N / 2), ROWS_DOWN);                                              \
        UNROLLED for (int b = 0; b < BANDS; ++b) part[b] = MULTIPLY_ADD(weights[b * DEEP + k], right, part[b]);      \
      }                                                                                                              \
      UNROLLED for (int b = 0; b < BANDS; ++b) {                                                                     \
        const int place = (c * BANDS + b) * WIDE + n;                                                                \
        sums[place] = ADDED(sums[place], part[b]);                                                                   \
      }                                                                                                              \
    }                                                                                                                \
  }

// --- outputs

// Where the area says by what a row's sums are multiplied before they are stored: behind its 32 numbers.
const int FACTOR = 32;

// Half a chunk of the strip's sums, which lies in the area, times the factors, to the rows that exist.
void store_half(Rows rows, int d0, bool accumulate) {
  for (int n = lane(); n < STRIP * 8; n += LANES) {
    const int row = strip_row() + n / 8, d = n % 8 * 4, at = area() + n / 8 * PITCH + d;
    if (row >= rows.count) break;
    const uint64_t first = rows.first + uint64_t(row * rows.distance);
    vec4 x = uintBitsToFloat(strips[at / 4]) * uintBitsToFloat(STRIP_WORD(area() + n / 8 * PITCH + FACTOR));
    if (accumulate) x += quad_at(first, d0 + d, rows.width, rows.kind);
    put_quad(first, d0 + d, rows.width, rows.kind, x);
  }
}

#define STORE_SUMS(name, CHUNKS, COUNT)                                                                              \
  void name(Rows rows, inout SumMatrix sums[COUNT], bool accumulate) {                                               \
    UNROLLED for (int half_chunk = 0; half_chunk < 2 * CHUNKS; ++half_chunk) {                                       \
      strip_barrier();                                                                                               \
      UNROLLED for (int n = 0; n < BANDS * HALF_ACROSS; ++n)                                                         \
        STORE_SUM(sums[(half_chunk / 2 * BANDS + n / HALF_ACROSS) * WIDE + half_chunk % 2 * HALF_ACROSS +            \
                       n % HALF_ACROSS],                                                                             \
                  area() + n / HALF_ACROSS * M * PITCH + n % HALF_ACROSS * N);                                       \
      strip_barrier();                                                                                               \
      store_half(rows, half_chunk * HALF, accumulate);                                                               \
    }                                                                                                                \
  }
