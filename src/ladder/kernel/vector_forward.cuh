// SPDX-License-Identifier: Apache-2.0
// The ladder's general rung, forward: tiles of K and V in shared memory, prefetched with cp.async (double buffering
// where it fits), register-blocked products. Every option of the contract. Device code; implements docs/algorithm.md,
// "Online softmax".
#pragma once

#include "gpu/kernel/lanes.cuh"
#include "gpu/kernel/scores.cuh"
#include "ladder/kernel/product.cuh"

namespace tessera::ladder {

template <Config config>
struct VectorForward {
  static constexpr int rows = Product<config>::rows, cols = Product<config>::cols, lanes = Product<config>::lanes;
  using Shared = VectorForwardShared<config>;
  static_assert(sizeof(Shared) == vector_forward_shared_bytes(config));

  Shared& shared;
  Product<config> product;
  float S[rows][cols];
  float O[rows][outs_of<config>(config.Dv)] = {};
  float m[rows], l[rows], lost[rows], alpha[rows];  // l: Kahan-compensated partial sum of this lane's columns

  __device__ VectorForward(Shared& shared, float sink) : shared(shared) {
    // A sink is a key with the score `sink` and no value; only one of the row's lanes adds it to l.
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      m[r] = sink, lost[r] = 0;
      l[r] = product.col(0) == 0 && sink != minus_infinity<float> ? 1 : 0;
    }
  }

  __device__ void multiply_QK(int stage) {
    product.template over_dims<config.D, config.element, config.element>(shared.Q, shared.K[stage], S);
  }

  // One step of online softmax: scores become P times the dropout factors; m and l are updated, alpha rescales O.
  __device__ void softmax(const ScoreOf<config.options>& score, const ScoreTile& tile) {
#pragma unroll
    for (int r = 0; r < rows; ++r)
#pragma unroll
      for (int c = 0; c < cols; ++c) S[r][c] = score(S[r][c], tile, product.row(r), product.col(c));
    const TileBand band(score.s.mask, tile, config.block_rows, config.block_cols, false);
    if (band.cuts) band.hide(product, S);
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      float top = m[r];
#pragma unroll
      for (int c = 0; c < cols; ++c) top = fmaxf(top, S[r][c]);
      top = max_over_lanes<lanes>(top);
      const float base = exponent_base(top);
      alpha[r] = exp2_of(m[r] - base);
      m[r] = top;
      float sum = 0;
#pragma unroll
      for (int c = 0; c < cols; ++c) {
        const float P = exp2_of(S[r][c] - base);
        sum += P;
        S[r][c] = P * score.keep(tile, product.row(r), product.col(c));
      }
      const float before = l[r] * alpha[r], term = fmaf(-lost[r], alpha[r], sum);
      l[r] = before + term;
      lost[r] = (l[r] - before) - term;
    }
  }

  // O = alpha O + P V.
  __device__ void multiply_PV(int stage) {
    product.template over_columns<config.element>(S, shared.P, shared.V[stage], alpha, O);
  }

  // Epilogue: stores O / l and LSE.
  __device__ void finish(const ForwardParams& p, const QueryPlace& place) const {
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const double sum = sum_over_lanes<lanes>(double(l[r]) - double(lost[r]));  // a shuffle: all lanes must take part
      const Int64 i = place.first + product.row(r), token = place.s.q_begin + i;
      if (i >= place.s.nq) continue;
      const float inverse = sum == 0 ? 0 : 1 / float(sum);
      store_row<config.Dv>(product, O[r], inverse, false, row_of<config.o>(p.o, place.b, token, place.h));
      if (product.col(0) == 0 && p.lse.data) *number_of(p.lse, place.b, token, place.h) = natural_lse(m[r], sum);
    }
  }
};

template <Config config>
__device__ void vector_forward(const ForwardParams& p) {
  using Kernel = VectorForward<config>;
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(memory);
  QueryPlace place;
  if (!query_place(p.x, config.block_rows, place)) return;
  const DeviceSequence& s = place.s;
  const ScoreOf<config.options> score(p.x, s, place.b, place.h);
  Kernel kernel(shared, p.x.sinks ? p.x.sinks[place.h * p.x.sink_head] * log2e<float> : minus_infinity<float>);

  const Range queries{place.first, lesser(place.first + config.block_rows, s.nq)};
  const Range seen = visible_keys(s.mask, queries);
  constexpr int block = config.block_cols;
  const TileRange tiles(seen, block);
  const auto load_tiles = [&](Int32 n) {
    if (n >= tiles.end) return;
    const Int64 key = Int64(n) * block;
    load_tile<config, config.D>(shared.K[n % config.stages], key_tile<config.element>(p.x.k, place, key), s.nk - key);
    load_tile<config, config.Dv>(shared.V[n % config.stages], key_tile<config.element>(p.x.v, place, key), s.nk - key);
    commit_copies();
  };

  load_tile<config, config.D>(shared.Q, query_tile<config.element>(p.x.q, place, place.first, place.h), queries.size());
  load_tiles(tiles.first);
  for (Int32 n = tiles.first; n < tiles.end; ++n) {
    const int stage = n % config.stages;
    wait_copies<0>();
    __syncthreads();  // this tile has arrived, and all warps are done with the previous one
    if constexpr (config.stages == 2) load_tiles(n + 1);
    kernel.multiply_QK(stage);
    kernel.softmax(score, ScoreTile(s, place.first, config.block_rows, Int64(n) * block, block));
    kernel.multiply_PV(stage);
    if constexpr (config.stages == 1) {
      __syncthreads();
      load_tiles(n + 1);
    }
  }
  kernel.finish(p, place);
}

}  // namespace tessera::ladder
