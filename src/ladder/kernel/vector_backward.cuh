// SPDX-License-Identifier: Apache-2.0
// The ladder's general rung, backward: two kernels, one for dQ and one for dK and dV. Each block is the only writer of
// its rows: no atomics, so deterministic. A block owns queries (dQ) and streams keys, or owns keys (dK, dV) and streams
// the queries of every head of the GQA group. Both recompute P and dS from rows that stay in shared memory and columns
// that are streamed through it. Device code; implements docs/algorithm.md, "Backward, tile by tile".
#pragma once

#include "gpu/kernel/delta.cuh"
#include "gpu/kernel/scores.cuh"
#include "ladder/kernel/product.cuh"

namespace tessera::ladder {

template <Config config, Side side>
struct VectorBackward {
  static constexpr bool owns_queries = side == Side::queries;
  static constexpr bool wants_dQK = (owns_queries ? config.dq : config.dk) != Element::none;
  static constexpr bool wants_dV = !owns_queries && config.dv != Element::none;
  static constexpr bool wants_dS = wants_dQK || config.dbias != Element::none;
  static constexpr int rows = Product<config>::rows, cols = Product<config>::cols;
  using Shared = VectorBackwardShared<config>;
  static_assert(sizeof(Shared) == vector_backward_shared_bytes(config));

  Shared& shared;
  const BackwardParams& p;
  const QueryPlace& place;
  Product<config> product;
  float P[rows][cols], dS[rows][cols];
  float dQK[wants_dQK ? rows : 1][outs_of<config>(config.D)] = {};  // dQ, or dK
  float dV[wants_dV ? rows : 1][outs_of<config>(config.Dv)] = {};

  __device__ VectorBackward(Shared& shared, const BackwardParams& p, const QueryPlace& place) :
      shared(shared), p(p), place(place) {}

  // --- loads, all asynchronous (cp.async): callers commit and wait

  // Loads q, dO, LSE and delta of a tile of queries; zeros beyond the last query.
  template <int count, int pitch, int pitch_v, int states>
  __device__ void load_queries(float (&q)[count][pitch], float (&d_o)[count][pitch_v], float (&lse2)[states],
                               float (&delta)[states], Int64 first, Int32 h) {
    const Int64 valid = place.s.nq - first;
    load_tile<config, config.D>(q, query_tile<config.element>(p.x.q, place, first, h), valid);
    load_tile<config, config.Dv>(d_o, query_tile<config.d_o>(p.d_o, place, first, h), valid);
    const Int64 at = h * p.row_head + place.b * p.row_batch + place.s.q_begin + first;
    for (int n = threadIdx.x; n < count; n += config.threads) {
      copy_number_async(&lse2[n], p.lse2 + (n < valid ? at + n : 0), n < valid);
      copy_number_async(&delta[n], p.delta + (n < valid ? at + n : 0), n < valid);
    }
  }

  template <int count, int pitch, int pitch_v>
  __device__ void load_keys(float (&k)[count][pitch], float (&v)[count][pitch_v], Int64 first) {
    const Int64 valid = place.s.nk - first;
    load_tile<config, config.D>(k, key_tile<config.element>(p.x.k, place, first), valid);
    load_tile<config, config.Dv>(v, key_tile<config.element>(p.x.v, place, first), valid);
  }

  // Queries that see no key have P = 0, but their q and dO may hold NaN, and 0 * NaN is NaN: they are replaced by 0.
  // Called by all threads after the queries have arrived; ends with a barrier.
  template <int count, int pitch, int pitch_v>
  __device__ void clear_blind_queries(float (&q)[count][pitch], float (&d_o)[count][pitch_v], int stage) {
    const auto blind = [&](int n) { return shared.lse2[stage][n] == -minus_infinity<float>; };
    if (!__syncthreads_or(threadIdx.x < count && blind(threadIdx.x))) return;
    for (int n = threadIdx.x; n < count * pitch; n += config.threads)
      if (blind(n / pitch)) q[n / pitch][n % pitch] = 0;
    for (int n = threadIdx.x; n < count * pitch_v; n += config.threads)
      if (blind(n / pitch_v)) d_o[n / pitch_v][n % pitch_v] = 0;
    __syncthreads();
  }

  // --- one tile

  // Calls body(r, c, query, key) for each of the thread's values [r][c] and its query and key in the tile.
  template <class Body>
  __device__ void for_each(Body body) const {
#pragma unroll
    for (int r = 0; r < rows; ++r)
#pragma unroll
      for (int c = 0; c < cols; ++c) {
        const int row = product.row(r), col = product.col(c);
        body(r, c, owns_queries ? row : col, owns_queries ? col : row);
      }
  }

  // Recomputes P (times the dropout factors) and dS. `of_scores`: dS without the derivative of the scores by their
  // products. It is what dBias needs.
  template <bool of_scores = false>
  __device__ void recompute(const ScoreOf<config.options>& score, const ScoreTile& tile, int stage) {
    constexpr Element row_VO = owns_queries ? config.d_o : config.element;
    constexpr Element column_VO = owns_queries ? config.element : config.d_o;
    product.template over_dims<config.D, config.element, config.element>(shared.row_QK, shared.column_QK[stage], P);
    if constexpr (wants_dS)
      product.template over_dims<config.Dv, row_VO, column_VO>(shared.row_VO, shared.column_VO[stage], dS);
    constexpr bool needs_derivative = config.options.need_derivative();
    float derivative[needs_derivative ? rows : 1][needs_derivative ? cols : 1];
    for_each([&](int r, int c, int query, int key) {
      P[r][c] = score(P[r][c], tile, query, key, needs_derivative ? &derivative[r][c] : nullptr);
    });
    const TileBand band(score.s.mask, tile, config.block_rows, config.block_cols, !owns_queries);
    if (band.cuts) band.hide(product, P);
    const int query_stage = owns_queries ? 0 : stage;
    for_each([&](int r, int c, int query, int key) {
      const float probability = exp2_of(P[r][c] - shared.lse2[query_stage][query]);
      const float keep = score.keep(tile, query, key);
      if constexpr (wants_dS) {
        dS[r][c] = probability * fmaf(keep, dS[r][c], -shared.delta[query_stage][query]);
        if constexpr (needs_derivative && !of_scores) dS[r][c] *= derivative[r][c];
      }
      P[r][c] = probability * keep;
    });
  }

  __device__ void accumulate(int stage) {
    float one[rows];
#pragma unroll
    for (int r = 0; r < rows; ++r) one[r] = 1;
    if constexpr (wants_dV) product.template over_columns<config.d_o>(P, shared.P, shared.column_VO[stage], one, dV);
    if constexpr (wants_dQK)
      product.template over_columns<config.element>(dS, shared.P, shared.column_QK[stage], one, dQK);
  }
};

// A tile of queries of one of the heads that share a KV head.
struct HeadTile {
  Int32 h, tile;
  __device__ HeadTile next(const TileRange& tiles) const {
    return tile + 1 < tiles.end ? HeadTile{h, tile + 1} : HeadTile{h + 1, tiles.first};
  }
};

template <Config config>
__device__ void vector_backward_queries(const BackwardParams& p) {
  using Kernel = VectorBackward<config, Side::queries>;
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(memory);
  QueryPlace place;
  if (!query_place(p.x, config.block_rows, place)) return;
  const DeviceSequence& s = place.s;
  const ScoreOf<config.options> score(p.x, s, place.b, place.h);
  Kernel kernel(shared, p, place);

  const Range seen = visible_keys(s.mask, {place.first, lesser(place.first + config.block_rows, s.nq)});
  constexpr int block = config.block_cols;
  const TileRange tiles(seen, block);
  const auto load = [&](Int32 n) {
    if (n < tiles.end)
      kernel.load_keys(shared.column_QK[n % config.stages], shared.column_VO[n % config.stages], Int64(n) * block);
    commit_copies();
  };

  if constexpr (config.own_delta) {
    const Int64 last = lesser(place.first + config.block_rows, s.nq);
#pragma unroll 4
    for (Int64 i = place.first + threadIdx.x / 32; i < last; i += config.threads / 32)
      prepare_row<config.o, config.d_o, config.Dv>(p, place, i);
    __syncthreads();
  }
  kernel.load_queries(shared.row_QK, shared.row_VO, shared.lse2[0], shared.delta[0], place.first, place.h);
  load(tiles.first);
  for (Int32 n = tiles.first; n < tiles.end; ++n) {
    const int stage = n % config.stages;
    wait_copies<0>();
    __syncthreads();  // this tile has arrived, and all warps are done with the previous one
    if (n == tiles.first) kernel.clear_blind_queries(shared.row_QK, shared.row_VO, 0);
    if constexpr (config.stages == 2) load(n + 1);
    kernel.recompute(score, ScoreTile(s, place.first, config.block_rows, Int64(n) * block, block), stage);
    kernel.accumulate(stage);
    if constexpr (config.stages == 1) {
      __syncthreads();
      load(n + 1);
    }
  }
#pragma unroll
  for (int r = 0; r < Kernel::rows; ++r) {
    const Int64 i = place.first + kernel.product.row(r);
    if (i < s.nq)
      store_row<config.D>(kernel.product, kernel.dQK[r], p.x.scale, p.accumulate,
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
  Kernel kernel(shared, p, place);

  const Range seen = visible_queries(s.mask, {place.first, lesser(place.first + config.block_rows, s.nk)});
  constexpr int block = config.block_cols;
  const TileRange tiles(seen, block);
  // Loop order: the heads of the GQA group, and for each of them all tiles of queries that see these keys.
  const Int32 end_head = place.h + (tiles.empty() ? 0 : p.x.Hq / p.x.Hk);
  const auto load = [&](const HeadTile& at, int stage) {
    if (at.h < end_head)
      kernel.load_queries(shared.column_QK[stage], shared.column_VO[stage], shared.lse2[stage], shared.delta[stage],
                          Int64(at.tile) * block, at.h);
    commit_copies();
  };

  kernel.load_keys(shared.row_QK, shared.row_VO, place.first);
  HeadTile now{place.h, tiles.first};
  load(now, 0);
  for (int stage = 0; now.h < end_head; stage = (stage + 1) % config.stages) {
    wait_copies<0>();
    __syncthreads();  // this tile has arrived, and all warps are done with the previous one
    kernel.clear_blind_queries(shared.column_QK[stage], shared.column_VO[stage], stage);
    const HeadTile next = now.next(tiles);
    if constexpr (config.stages == 2) load(next, 1 - stage);
    const ScoreOf<config.options> score(p.x, s, place.b, now.h);
    kernel.recompute(score, ScoreTile(s, Int64(now.tile) * block, block, place.first, config.block_rows), stage);
    kernel.accumulate(stage);
    if constexpr (config.stages == 1) {
      __syncthreads();
      load(next, 0);
    }
    now = next;
  }
#pragma unroll
  for (int r = 0; r < Kernel::rows; ++r) {
    const Int64 j = place.first + kernel.product.row(r);
    if (j >= s.nk) continue;
    if constexpr (Kernel::wants_dQK)
      store_row<config.D>(kernel.product, kernel.dQK[r], p.x.scale, p.accumulate, key_row<config.dk>(p.dk, place, j));
    if constexpr (Kernel::wants_dV)
      store_row<config.Dv>(kernel.product, kernel.dV[r], 1, p.accumulate, key_row<config.dv>(p.dv, place, j));
  }
}

}  // namespace tessera::ladder
