// The ladder's general rung, backward, without atomics: one kernel owns blocks of queries and sums dQ over the keys,
// one owns blocks of keys and sums dK and dV over the queries (and the query heads of a KV head). Both are the same
// text: P and dS are recomputed from rows that a block owns and columns that stream past. Every option of the contract
// but dBias. Device text; implements docs/algorithm.md, "Backward, tile by tile".
#pragma once

#include "simt/kernel/product.cuh"
#include "simt/kernel/scores.cuh"

namespace tessera::simt {

enum class Side { queries, keys };  // what the rows are

// LSE (times log2e) and delta of one query; a query that does not exist gets P = 0.
struct RowState {
  float lse2 = -minus_infinity<float>, delta = 0;
};

__device__ inline RowState row_state(const BackwardParams& p, const DeviceSequence& s, Int32 b, Int32 h, Int64 i) {
  if (i >= s.nq) return {};
  const Int64 at = h * p.row_head + b * p.row_batch + s.q_begin + i;
  return {p.lse2[at], p.delta[at]};
}

template <Config config, Side side>
struct VectorBackward {
  static constexpr int rows = config.rows_per_thread, cols = config.block_cols / lanes_per_row;
  static constexpr int D = padded_to_4(config.D), Dv = padded_to_4(config.Dv);
  static constexpr int wide_D = padded_to_64(config.D), wide_Dv = padded_to_64(config.Dv);
  using Shared = VectorBackwardShared<config>;
  static_assert(sizeof(Shared) == vector_backward_shared_bytes(config));
  static_assert(config.block_rows == config.threads / lanes_per_row * rows);

  Shared& shared;
  const BackwardParams& p;
  const int row0 = threadIdx.x / lanes_per_row * rows, lane = threadIdx.x % lanes_per_row;
  float P[rows][cols], dS[rows][cols];
  float dX[rows][wide_D / lanes_per_row] = {};                            // dQ, or dK
  float dY[side == Side::keys ? rows : 1][wide_Dv / lanes_per_row] = {};  // dV

  __device__ VectorBackward(Shared& shared, const BackwardParams& p) : shared(shared), p(p) {}

  // P (times the dropout factors) and dS of one tile, from the operands in shared memory.
  __device__ void recompute(const ScoreOf<config>& score, Int64 row_first, Int64 col_first, bool masked) {
    multiply_over_dims<D>(shared.X, shared.x, row0, lane, P);
    multiply_over_dims<Dv>(shared.Y, shared.y, row0, lane, dS);
    const float factor = score.q_factor();
#pragma unroll
    for (int r = 0; r < rows; ++r)
#pragma unroll
      for (int c = 0; c < cols; ++c) {
        const Int64 row = row_first + row0 + r, col = col_first + lane + lanes_per_row * c;
        const Int64 i = side == Side::queries ? row : col, j = side == Side::queries ? col : row;
        const RowState state = row_state(p, score.s, score.b, score.h, i);
        float derivative = 1;
        const float S = score(P[r][c] * factor, i, j, masked, &derivative);
        const float probability = exp2f(S - state.lse2), keep = score.keep(i, j);
        dS[r][c] = probability * (keep * dS[r][c] - state.delta) * derivative;
        P[r][c] = probability * keep;
      }
  }

  // A tile in registers becomes rows in shared memory, which the same half warp reads.
  __device__ void share(const float (&tile)[rows][cols]) {
    __syncwarp();
#pragma unroll
    for (int r = 0; r < rows; ++r)
#pragma unroll
      for (int c = 0; c < cols; ++c) shared.P[row0 + r][lane + lanes_per_row * c] = tile[r][c];
    __syncwarp();
  }

  __device__ void accumulate() {
    float one[rows];
#pragma unroll
    for (int r = 0; r < rows; ++r) one[r] = 1;
    if constexpr (side == Side::keys) {
      share(P);
      multiply_over_columns<config.block_cols>(shared.P, shared.y, row0, lane, one, dY);
    }
    share(dS);
    multiply_over_columns<config.block_cols>(shared.P, shared.x, row0, lane, one, dX);
  }
};

// Queries that see nothing have P = 0, but their q and dO may hold NaN: they become 0.
template <Config config, int rows, int stride>
__device__ inline void clear_dead_rows(float (&tile)[rows][stride], const BackwardParams& p, const DeviceSequence& s,
                                       Int32 b, Int32 h, Int64 first) {
  for (int n = threadIdx.x; n < rows * stride; n += config.threads)
    if (row_state(p, s, b, h, first + n / stride).lse2 == -minus_infinity<float>) tile[n / stride][n % stride] = 0;
}

template <Config config>
__device__ void vector_backward_queries(const BackwardParams& p) {
  using Kernel = VectorBackward<config, Side::queries>;
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(memory);
  QueryPlace place;
  if (!query_place(p.x, config.block_rows, place)) return;
  const DeviceSequence& s = place.s;
  const ScoreOf<config> score(p.x, s, place.b, place.h);
  Kernel kernel(shared, p);

  const Range queries{place.first, lesser(place.first + config.block_rows, s.nq)};
  const Int64 first_row = s.q_begin + place.first;
  load_tile<config, config.element, Kernel::D, config.D>(shared.X, p.x.q, place.b, first_row, queries.size(), place.h);
  load_tile<config, config.d_o, Kernel::Dv, config.Dv>(shared.Y, p.d_o, place.b, first_row, queries.size(), place.h);
  const Range seen = visible_keys(s.mask, queries);
  constexpr Int64 block = config.block_cols;
  for (Int64 n = seen.begin / block; n * block < seen.end; ++n) {
    load_tile<config, config.element, Kernel::wide_D, config.D>(shared.x, p.x.k, place.b, s.k_begin + n * block,
                                                                s.nk - n * block, place.kv);
    load_tile<config, config.element, Kernel::wide_Dv, config.Dv>(shared.y, p.x.v, place.b, s.k_begin + n * block,
                                                                  s.nk - n * block, place.kv);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    if (n == seen.begin / block) {
      clear_dead_rows<config>(shared.X, p, s, place.b, place.h, place.first);
      clear_dead_rows<config>(shared.Y, p, s, place.b, place.h, place.first);
      __syncthreads();
    }
    const Range keys{n * block, (n + 1) * block};
    kernel.recompute(score, place.first, keys.begin, tile_class(s.mask, queries, keys) != TileClass::full);
    kernel.accumulate();
    __syncthreads();
  }
  wait_copies<0>();
#pragma unroll
  for (int r = 0; r < Kernel::rows; ++r) {
    const Int64 i = place.first + kernel.row0 + r;
    if (i < s.nq)
      store_row<config.D>(kernel.dX[r], kernel.lane, p.x.scale, p.accumulate,
                          row_of<config.dq>(p.dq, place.b, s.q_begin + i, place.h));
  }
}

template <Config config>
__device__ void vector_backward_keys(const BackwardParams& p) {
  using Kernel = VectorBackward<config, Side::keys>;
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(memory);
  QueryPlace place;
  if (!key_place(p.x, config.block_rows, place)) return;
  const DeviceSequence& s = place.s;
  Kernel kernel(shared, p);

  const Range keys{place.first, lesser(place.first + config.block_rows, s.nk)};
  const Int64 first_row = s.k_begin + place.first;
  load_tile<config, config.element, Kernel::D, config.D>(shared.X, p.x.k, place.b, first_row, keys.size(), place.kv);
  load_tile<config, config.element, Kernel::Dv, config.Dv>(shared.Y, p.x.v, place.b, first_row, keys.size(), place.kv);
  const Range seen = visible_queries(s.mask, keys);
  constexpr Int64 block = config.block_cols;
  for (Int32 h = place.h; h < place.h + p.x.Hq / p.x.Hk; ++h) {
    const ScoreOf<config> score(p.x, s, place.b, h);
    for (Int64 n = seen.begin / block; n * block < seen.end; ++n) {
      load_tile<config, config.element, Kernel::wide_D, config.D>(shared.x, p.x.q, place.b, s.q_begin + n * block,
                                                                  s.nq - n * block, h);
      load_tile<config, config.d_o, Kernel::wide_Dv, config.Dv>(shared.y, p.d_o, place.b, s.q_begin + n * block,
                                                                s.nq - n * block, h);
      commit_copies();
      wait_copies<0>();
      __syncthreads();
      clear_dead_rows<config>(shared.x, p, s, place.b, h, n * block);
      clear_dead_rows<config>(shared.y, p, s, place.b, h, n * block);
      __syncthreads();
      const Range queries{n * block, lesser((n + 1) * block, s.nq)};
      kernel.recompute(score, place.first, n * block, tile_class(s.mask, queries, keys) != TileClass::full);
      kernel.accumulate();
      __syncthreads();
    }
  }
  wait_copies<0>();
#pragma unroll
  for (int r = 0; r < Kernel::rows; ++r) {
    const Int64 j = place.first + kernel.row0 + r;
    if (j >= s.nk) continue;
    if (p.dk.data)
      store_row<config.D>(kernel.dX[r], kernel.lane, p.x.scale, p.accumulate,
                          row_of<config.dk>(p.dk, place.b, s.k_begin + j, place.kv));
    if (p.dv.data)
      store_row<config.Dv>(kernel.dY[r], kernel.lane, 1, p.accumulate,
                           row_of<config.dv>(p.dv, place.b, s.k_begin + j, place.kv));
  }
}

}  // namespace tessera::simt
