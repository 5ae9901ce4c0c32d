// SPDX-License-Identifier: Apache-2.0
// The ladder's rung `warp`, forward: a warp owns a few queries and keeps their softmax state and O in registers. In a
// row of scores each lane holds a key; butterfly reductions give the maximum and the sum. In a row of O each lane holds
// dims; warp shuffles broadcast P. Device code; implements docs/algorithm.md, "Online softmax".
#pragma once

#include "ladder/kernel/rows.cuh"

namespace tessera::ladder {

template <Config config>
struct WarpForward {
  static constexpr int rows = config.block_rows / (config.threads / 32);  // of a warp
  static constexpr int chunks = int(ceil_div(config.Dv, warp_dims));      // of a row of V
  static constexpr int chunk_groups = warp_dims / 32;                     // dims of a chunk that a lane has
  using Shared = WarpForwardShared<config>;
  static_assert(sizeof(Shared) == warp_forward_shared_bytes(config));

  Shared& shared;
  const int row0 = threadIdx.x / 32 * rows, lane = threadIdx.x % 32;
  float P[rows], alpha[rows];  // P: of this lane's key; before the softmax, its score
  float O[rows][chunks][chunk_groups] = {};
  SoftmaxRow state[rows];

  __device__ explicit WarpForward(Shared& shared) : shared(shared) {}

  // Accumulates scores over the dims of K that are in the tile, from `begin` on.
  __device__ void add_scores(int begin) {
    const int width = int(lesser(warp_dims, padded_to_4(config.D) - begin));
    add_products<padded_to_4(config.D)>(&shared.Q[row0][begin], shared.tile[lane], width, P);
  }

  // One step of online softmax: scores become P; m and l are updated, alpha rescales O.
  __device__ void softmax(const TileMask& mask) {
    float top[rows], sum[rows];
#pragma unroll
    for (int r = 0; r < rows; ++r) top[r] = P[r] = mask.visible(row0 + r, lane) ? P[r] : minus_infinity<float>;
    max_over_lanes<32>(top);
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      alpha[r] = state[r].raise(top[r]);
      sum[r] = P[r] = state[r].P(P[r]);
    }
    sum_over_lanes<32>(sum);
#pragma unroll
    for (int r = 0; r < rows; ++r) state[r].add(sum[r]);
  }

  // O = alpha O + P V, for the dims of V that are in the tile.
  __device__ void multiply_PV(int chunk) {
    float part[rows][chunk_groups] = {};
#pragma unroll 4
    for (int j = 0; j < 32; ++j) {
      float v[chunk_groups];
#pragma unroll
      for (int g = 0; g < chunk_groups; ++g) v[g] = shared.tile[j][lane + 32 * g];
#pragma unroll
      for (int r = 0; r < rows; ++r) {
        const float p = __shfl_sync(0xffffffffu, P[r], j);
#pragma unroll
        for (int g = 0; g < chunk_groups; ++g) part[r][g] = fmaf(p, v[g], part[r][g]);
      }
    }
#pragma unroll
    for (int r = 0; r < rows; ++r)
#pragma unroll
      for (int g = 0; g < chunk_groups; ++g) O[r][chunk][g] = fmaf(alpha[r], O[r][chunk][g], part[r][g]);
  }

  // Epilogue: stores O / l and LSE.
  __device__ void finish(const ForwardParams& p, const QueryPlace& place) const {
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const Int64 i = place.first + row0 + r, token = place.s.q_begin + i;
      if (i >= place.s.nq) return;
      auto* o = row_of<config.o>(p.o, place.b, token, place.h);
      const float inverse = state[r].inverse();
#pragma unroll
      for (int c = 0; c < chunks; ++c)
#pragma unroll
        for (int g = 0; g < chunk_groups; ++g)
          if (const int d = c * warp_dims + lane + 32 * g; d < config.Dv) from_float(O[r][c][g] * inverse, o[d]);
      if (p.lse.data && lane == 0) *number_of(p.lse, place.b, token, place.h) = state[r].lse();
    }
  }
};

template <Config config>
__device__ void warp_forward(const ForwardParams& p) {
  using Kernel = WarpForward<config>;
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(memory);
  QueryPlace place;
  if (!query_place(p.x, config.block_rows, place)) return;
  const DeviceSequence& s = place.s;
  Kernel kernel(shared);

  const Range queries{place.first, lesser(place.first + config.block_rows, s.nq)};
  const auto q = query_tile<config.element>(p.x.q, place, queries.begin, place.h);
  load_rows<config, padded_to_4(config.D)>(
      shared.Q, q, config.D, [&](int r) { return r < queries.size(); }, p.x.score_scale * log2e<float>);

  const Range tiles = tiles_of(visible_keys(s.mask, queries), 32);
  for (Int64 n = tiles.begin; n < tiles.end; ++n) {
    const Range keys{32 * n, 32 * (n + 1)};
    const auto load = [&](const TokenRef& t, int first_dim, int D) {
      TileRows<config.element> rows = key_tile<config.element>(t, place, keys.begin);
      rows.first += first_dim;
      __syncthreads();  // all warps have read the previous tile
      load_rows<config, warp_dims>(shared.tile, rows, D - first_dim, [&](int r) { return keys.begin + r < s.nk; });
      __syncthreads();
    };
#pragma unroll
    for (int r = 0; r < Kernel::rows; ++r) kernel.P[r] = 0;
#pragma unroll 1
    for (int begin = 0; begin < config.D; begin += warp_dims) {
      load(p.x.k, begin, config.D);
      kernel.add_scores(begin);
    }
    kernel.softmax(TileMask(s.mask, queries.begin, keys.begin));
#pragma unroll
    for (int chunk = 0; chunk < Kernel::chunks; ++chunk) {
      load(p.x.v, chunk * warp_dims, config.Dv);
      kernel.multiply_PV(chunk);
    }
  }
  kernel.finish(p, place);
}

}  // namespace tessera::ladder
