// SPDX-License-Identifier: Apache-2.0
// The `mma` backward kernels, in two passes over the scores: a block owns queries and sums dQ, or keys and sums dK and
// dV, while the other side streams past, by cp.async, one or two stages ahead. Every gradient has one writer, in a
// fixed order. Device code; implements docs/algorithm.md, "Backward, tile by tile".
#pragma once

#include "gpu/kernel/accumulator.cuh"
#include "gpu/kernel/scores.cuh"
#include "mma/kernel/backward_work.cuh"
#include "mma/tile/copy.cuh"
#include "mma/tile/product.cuh"

namespace tessera::mma {

template <BackwardConfig config>
struct Backward {
  static constexpr int R = config.row_tiles, columns = config.block_columns, rows = rows_of(config);
  static constexpr bool queries = config.side == Side::queries;
  static constexpr bool wants_dX = config.dX != Element::none, wants_dY = config.dY != Element::none;
  static constexpr BackwardLayout layout = layout_of(config);
  using Scores = float[R][columns / 2];
  using Packed = UInt32[R][columns / 16][4];  // an operand of the next product

  const BackwardParams& p;
  const BackwardWork& w;
  const UInt32 memory;  // of the block
  const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 * 16 * R;
  // What this lane gives to ldmatrix: of its warp's rows, of columns as operands of products along rows and over rows.
  const int own_byte = first_row * gpu::panel_row_bytes + lane_byte(a_row(lane), a_column(lane));
  const int along_byte = lane_byte(b_row(lane), b_column(lane)), over_byte = lane_byte(t_row(lane), t_column(lane));
  float dX[R][wants_dX ? config.D / 2 : 1] = {}, dY[R][wants_dY ? config.Dv / 2 : 1] = {};
  float lse2[R][2], delta[R][2];  // of queries as rows

  __device__ Backward(const BackwardParams& p, const BackwardWork& w, UInt32 memory) : p(p), w(w), memory(memory) {}

  // Where delta and LSE of query i of a head lie.
  __device__ Int64 number_at(Int32 head, Int64 token) const {
    return head * p.call.row_head + w.b * p.call.row_batch + token;
  }
  __device__ void read_numbers_of_rows() {
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const Int32 i = w.first + first_row + 16 * r + gpu::accumulator_row(lane, 2 * e);
        const Int64 at = number_at(w.row_head, w.row_begin + i);
        lse2[r][e] = i < w.rows ? p.call.lse2[at] : -minus_infinity<float>;
        delta[r][e] = i < w.rows ? p.call.delta[at] : 0;
      }
  }
  __device__ UInt32 numbers(int stage) const { return memory + layout.numbers + stage * layout.numbers_bytes; }
  __device__ float lse2_of(int r, int n, int stage) const {
    if constexpr (queries) return lse2[r][n / 2 % 2];
    return load_number(numbers(stage) + 4 * gpu::accumulator_column(lane, n));
  }
  __device__ float delta_of(int r, int n, int stage) const {
    if constexpr (queries) return delta[r][n / 2 % 2];
    return load_number(numbers(stage) + 4 * columns + 4 * gpu::accumulator_column(lane, n));
  }

  // --- copies

  template <int count, int width>
  __device__ void copy(UInt32 to, const gpu::TokenRef& t, Int64 token, Int32 head, int valid, int dims) const {
    const auto* from = gpu::row_of<config.element>(t, w.b, token, head);
    TileCopy<config, count, width>(to, &from->bits, t.token, valid, dims).issue_all();
  }
  __device__ void copy_rows() const {
    const gpu::Question& x = p.call.x;
    const Int64 token = w.row_begin + w.first;
    copy<rows, config.D>(memory + layout.X, queries ? x.q : x.k, token, w.row_head, w.rows - w.first, p.D);
    if constexpr (wants_dX)
      copy<rows, config.Dv>(memory + layout.Y, queries ? p.call.d_o : x.v, token, w.row_head, w.rows - w.first, p.Dv);
  }
  __device__ void copy_columns(Int32 head, Int32 n, int stage) const {
    const gpu::Question& x = p.call.x;
    const Int64 token = w.column_begin + Int64(n) * columns;
    const Int32 valid = w.columns - n * columns;
    copy<columns, config.D>(memory + layout.x + stage * layout.x_bytes, queries ? x.k : x.q, token, head, valid, p.D);
    copy<columns, config.Dv>(memory + layout.y + stage * layout.y_bytes, queries ? x.v : p.call.d_o, token, head, valid,
                             p.Dv);
    const int column = threadIdx.x;
    if (queries || column >= columns) return;
    const Int64 at = number_at(head, token + column);
    copy_number<config>(numbers(stage) + 4 * column, p.call.lse2 + at, column < valid);
    copy_number<config>(numbers(stage) + 4 * (columns + column), p.call.delta + at, column < valid);
  }

  // Queries that see nothing have P = 0 but may hold NaN, and 0 NaN is NaN: their rows become 0. Their LSE is +inf
  // here, which the thread that has copied it looks at.
  __device__ bool copied_a_blind_query(int stage) const {
    return threadIdx.x < columns && load_number(numbers(stage) + 4 * threadIdx.x) == -minus_infinity<float>;
  }
  template <int width>
  __device__ void clear_blind_queries(UInt32 tile, int stage) const {
    constexpr int chunks = width / gpu::chunk_columns;
    for (int n = threadIdx.x; n < columns * chunks; n += threads_of(config))
      if (load_number(numbers(stage) + n / chunks * 4) == -minus_infinity<float>)
        store_chunk(tile + gpu::tile_byte(columns, n / chunks, n % chunks * gpu::chunk_columns), {0, 0, 0, 0});
  }

  // --- a tile

  __device__ void multiply_S(Scores& S, UInt32 x) const {
    constexpr int steps = config.D / 16;
    const UInt32 X = memory + layout.X + own_byte;
    if constexpr (config.halves_S) {
      Scores rest;
      multiply_along_rows<config, rows, 0, steps / 2>(S, X, x);
      multiply_along_rows<config, rows, steps / 2, steps>(rest, X, x);
#pragma unroll
      for (int r = 0; r < R; ++r)
#pragma unroll
        for (int n = 0; n < columns / 2; ++n) S[r][n] += rest[r][n];
    } else {
      multiply_along_rows<config, rows, 0, steps>(S, X, x);
    }
  }

  // P, in the place of S, and packed.
  __device__ void exponentiate(Scores& S, Packed& P, Int32 n, int stage) const {
    const Int32 column = n * columns;
    const bool whole = column >= first_row + 16 * R - 1 + w.low && column + columns - 1 <= first_row + w.high &&
                       column + columns <= w.columns;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const Int32 distance = first_row + 16 * r - column;
      if (!whole) gpu::hide<columns>(S[r], lane, w.low + distance, w.high + distance, w.columns - column);
#pragma unroll
      for (int e = 0; e < columns / 2; ++e) S[r][e] = gpu::exp2_of(fmaf(S[r][e], p.factor, -lse2_of(r, e, stage)));
      if constexpr (wants_dY) pack(P[r], [&](int e) { return S[r][e]; });
    }
  }

  // With options. In the place of S comes what dS is a multiple of, P times the softcap's derivative, and negative
  // where dropout takes the key away. `head`: of the query.
  __device__ void exponentiate_one_by_one(Scores& S, Packed& P, Int32 head, Int32 n, int stage) const {
    const Int32 column = n * columns;
    const gpu::DeviceSequence s{0, 0, queries ? w.rows : w.columns, queries ? w.columns : w.rows, w.shift, {}};
    const gpu::ScoreOf<config.options> score(p.call.x, s, w.b, head);
    const gpu::ScoreTile at =
        queries ? gpu::ScoreTile(s, w.first, rows, column, columns) : gpu::ScoreTile(s, column, columns, w.first, rows);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      gpu::SeenColumns seen[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const Int32 distance = first_row + 16 * r - column;
        seen[e] = gpu::seen_columns(lane, e, w.low + distance, w.high + distance, w.columns - column);
      }
#pragma unroll
      for (int e = 0; e < columns / 2; e += 2) {
        float kept[2];
#pragma unroll
        for (int d = 0; d < 2; ++d) {
          float& x = S[r][e + d];
          const int own = first_row + 16 * r + gpu::accumulator_row(lane, e), c = gpu::accumulator_column(lane, e + d);
          const int query = queries ? own : c, key = queries ? c : own;
          const int counted = e / 4 * 8 + d, half = e / 2 % 2;
          float derivative = 1;
          const float score_of = score(x, at, query, key, config.options.need_derivative() ? &derivative : nullptr);
          const bool sees = seen[half].first <= counted && counted <= seen[half].last;
          const float exponential = sees ? gpu::exp2_of(score_of - lse2_of(r, e + d, stage)) : 0;
          const float keep = score.keep(at, query, key);
          kept[d] = exponential * keep;
          x = keep == 0 ? -exponential * derivative : exponential * derivative;
        }
        if constexpr (wants_dY) P[r][e / 8][e / 2 % 4] = gpu::packed<config.element>(kept[0], kept[1]);
      }
    }
  }

  template <class Number>
  __device__ static void pack(UInt32 (&to)[columns / 16][4], Number number) {
#pragma unroll
    for (int e = 0; e < columns / 2; e += 2)
      to[e / 8][e / 2 % 4] = gpu::packed<config.element>(number(e), number(e + 1));
  }

  __device__ float dS_of(float S, float dP, float delta) const {
    if constexpr (!config.options.dropout) return S * (dP - delta);
    return fabsf(S) * ((S < 0 ? 0 : dP * p.call.x.keep_scale) - delta);
  }

  __device__ void tile(Int32 head, Int32 n, int stage) {
    const Int32 column = n * columns;
    if (column + columns - 1 < first_row + w.low || column > first_row + 16 * R - 1 + w.high) return;  // sees nothing
    const UInt32 x = memory + layout.x + stage * layout.x_bytes, y = memory + layout.y + stage * layout.y_bytes;
    Scores S;
    Packed operand;
    multiply_S(S, x + along_byte);
    if constexpr (config.general)
      exponentiate_one_by_one(S, operand, queries ? w.row_head : head, n, stage);
    else
      exponentiate(S, operand, n, stage);
    if constexpr (wants_dY) multiply_over_rows<config>(dY, operand, y + over_byte);
    if constexpr (wants_dX) {
      Scores dP;
      multiply_along_rows<config, rows, 0, config.Dv / 16>(dP, memory + layout.Y + own_byte, y + along_byte);
#pragma unroll
      for (int r = 0; r < R; ++r)
        pack(operand[r], [&](int e) { return dS_of(S[r][e], dP[r][e], delta_of(r, e, stage)); });
      multiply_over_rows<config>(dX, operand, x + over_byte);
    }
  }

  // --- the loop over tiles of columns, of all heads of the group

  __device__ void sum() {
    if constexpr (queries) read_numbers_of_rows();
    if (w.begin >= w.end) return;
    copy_rows();
    copy_columns(w.head, w.begin, 0);
    commit_copies();
    const Int32 end_head = w.head + w.heads;
    int stage = 0;
#pragma unroll 1
    for (Int32 head = w.head, n = w.begin; head < end_head;) {
      Int32 next_head = head, next = n + 1;
      if (next == w.end) next = w.begin, ++next_head;
      wait_copies<0>();
      if constexpr (queries) {
        __syncthreads();  // this tile has arrived, and all warps are done with the one before
      } else if (__syncthreads_or(copied_a_blind_query(stage))) {
        clear_blind_queries<config.D>(memory + layout.x + stage * layout.x_bytes, stage);
        clear_blind_queries<config.Dv>(memory + layout.y + stage * layout.y_bytes, stage);
        __syncthreads();
      }
      if constexpr (config.stages == 2)
        if (next_head < end_head) copy_columns(next_head, next, 1 - stage);
      commit_copies();
      tile(head, n, stage);
      if constexpr (config.stages == 2) {
        stage ^= 1;
      } else {
        __syncthreads();
        if (next_head < end_head) copy_columns(next_head, next, 0);
        commit_copies();
      }
      head = next_head, n = next;
    }
  }

  template <Element element, int values>
  __device__ void write(float (&sums)[R][values], const gpu::TokenRef& to, int count, float factor) {
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const Int32 i = w.first + first_row + 16 * r + gpu::accumulator_row(lane, 2 * e);
        auto* row = gpu::row_of<element>(to, w.b, w.row_begin + i, w.row_head);
        const bool sees = !queries || lse2[r][e] != -minus_infinity<float>;
#pragma unroll
        for (int n = 2 * e; n < values; n += 4)
#pragma unroll
          for (int d = 0; d < 2; ++d) sums[r][n + d] = sees ? sums[r][n + d] * factor : 0;
        if constexpr (element == Element::f32)  // no other type accumulates
          if (p.call.accumulate) gpu::add_row<2 * values>(sums[r], e, lane, row, count, i < w.rows);
        gpu::store_row<element, 2 * values>(sums[r], e, lane, row, count, i < w.rows);
      }
  }
  __device__ void write() {
    if constexpr (wants_dX) write<config.dX>(dX, queries ? p.call.dq : p.call.dk, p.D, p.call.x.scale);
    if constexpr (wants_dY) write<config.dY>(dY, p.call.dv, p.Dv, 1);
  }
};

template <BackwardConfig config>
__device__ void backward(const BackwardParams& p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& work = *reinterpret_cast<BackwardWork*>(memory + layout_of(config).work);
  if (threadIdx.x == 0)
    describe_work<config.side, rows_of(config), config.block_columns>(p.call.x, p.tiles_per_head, p.section,
                                                                      Int32(blockIdx.x), work);
  __syncthreads();
  if (work.first >= work.rows) return;
  Backward<config> kernel(p, work, shared_address(memory));
  kernel.sum();
  kernel.write();
}

}  // namespace tessera::mma
