// SPDX-License-Identifier: Apache-2.0
// The ladder's second rung, backward: a block owns a tile of queries and their dQ. What a tile of scores contributes to
// dK and dV is reduced over its queries first and then added to f32 accumulators in the workspace: one float atomic per
// element. `convert` writes dK and dV from there. Device code; implements docs/algorithm.md, "Backward".
#pragma once

#include "ladder/kernel/tiled.cuh"

namespace tessera::ladder {

template <Config config>
struct TiledBackward : TiledThread<config> {
  using Thread = TiledThread<config>;
  using Thread::cols, Thread::rows, Thread::column, Thread::row0, Thread::row_step;
  static constexpr int groups = tiled_width(config, config.D) / cols;  // of columns of dQ

  // In products that reduce over queries, whose results are dK and dV, a thread has neighbouring keys and one column.
  static constexpr int thread_keys = cols * config.block_rows / config.threads;
  using Shared = TiledBackwardShared<config>;
  static_assert(sizeof(Shared) == tiled_backward_shared_bytes(config));

  Shared& shared;
  float dQ[rows][groups] = {};

  __device__ explicit TiledBackward(Shared& shared) : shared(shared) {}

  // Loads the tile's queries. Queries that see no key have LSE = +inf here; their q and dO may hold NaN and are
  // replaced by 0.
  __device__ void load_queries(const BackwardParams& p, const QueryPlace& place) {
    const Int64 token = place.s.q_begin + place.first, left = place.s.nq - place.first;
    const Int64 at = place.h * p.row_head + place.b * p.row_batch + token;
    for (int r = threadIdx.x; r < config.block_rows; r += config.threads) {
      shared.lse2[r] = r < left ? p.lse2[at + r] : -minus_infinity<float>;
      shared.delta[r] = r < left ? p.delta[at + r] : 0;
    }
    __syncthreads();
    const auto is_used = [&](int r) { return sees_something(r); };
    load_rows<config, tiled_width(config, config.D)>(
        shared.Q, query_tile<config.element>(p.x.q, place, place.first, place.h), config.D, is_used);
    load_rows<config, tiled_width(config, config.Dv)>(
        shared.dO, query_tile<config.d_o>(p.d_o, place, place.first, place.h), config.Dv, is_used);
  }

  __device__ bool sees_something(int row) const { return shared.lse2[row] != -minus_infinity<float>; }

  // Recomputes P and dS of one tile. `factor` is the scale times log2(e): exponentials are base 2.
  __device__ void recompute(float factor, const TileMask& mask) {
    float S[rows], dP[rows];
    this->template multiply_over_dims<config.D>(shared.Q, shared.K, S);
    this->template multiply_over_dims<config.Dv>(shared.dO, shared.V, dP);
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const int row = row0 + r * row_step;
      const bool seen = sees_something(row) && mask.visible(row, column);
      const float P = seen ? exp2f(fmaf(S[r], factor, -shared.lse2[row])) : 0;
      shared.P[row][column] = P;
      shared.dS[row][column] = seen ? P * (dP[r] - shared.delta[row]) : 0;
    }
  }

  // dQ += dS K.
  __device__ void multiply_dSK() {
    float one[rows];
#pragma unroll
    for (int r = 0; r < rows; ++r) one[r] = 1;
    this->multiply_over_keys(shared.dS, shared.K, one, dQ);
  }

  // X^T Y, summed over the tile's queries, is added to `keys` rows of dV (X = P, Y = dO) or dK (X = dS, Y = Q).
  template <int D, int X_pitch, int Y_pitch>
  __device__ void add_to_keys(const float (&X)[config.block_rows][X_pitch],
                              const float (&Y)[config.block_rows][Y_pitch], float* sum, Int64 keys) const {
    const int key0 = threadIdx.x / config.block_rows * thread_keys;
#pragma unroll 1
    for (int d = threadIdx.x % config.block_rows; d < D; d += config.block_rows) {
      float part[thread_keys] = {};
#pragma unroll 2
      for (int i = 0; i < config.block_rows; ++i) {
        const float y = Y[i][d];
#pragma unroll
        for (int n = 0; n < thread_keys; ++n) part[n] = fmaf(X[i][key0 + n], y, part[n]);
      }
#pragma unroll
      for (int n = 0; n < thread_keys; ++n)
        if (key0 + n < keys) atomicAdd(sum + (key0 + n) * padded_to_4(D) + d, part[n]);
    }
  }
};

template <Config config>
__device__ void tiled_backward(const BackwardParams& p) {
  using Kernel = TiledBackward<config>;
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(memory);
  QueryPlace place;
  if (!query_place(p.x, config.block_rows, place)) return;
  const DeviceSequence& s = place.s;
  Kernel kernel(shared);
  kernel.load_queries(p, place);

  const Range queries{place.first, lesser(place.first + config.block_rows, s.nq)};
  const Range tiles = tiles_of(visible_keys(s.mask, queries), config.block_cols);
  const Int64 key_row = place.kv * p.key_head + place.b * p.key_batch + s.k_begin;
  for (Int64 n = tiles.begin; n < tiles.end; ++n) {
    const Range keys{n * config.block_cols, (n + 1) * config.block_cols};
    load_keys<config>(shared, p.x, place, keys.begin);
    __syncthreads();
    kernel.recompute(p.x.score_scale * log2e<float>, TileMask(s.mask, queries.begin, keys.begin));
    __syncthreads();
    if (p.dq.data) kernel.multiply_dSK();
    const Int64 row = key_row + keys.begin, left = s.nk - keys.begin;
    if (p.dv_sum.data)
      kernel.template add_to_keys<config.Dv>(shared.P, shared.dO, p.dv_sum.data + row * padded_to_4(config.Dv), left);
    if (p.dk_sum.data)
      kernel.template add_to_keys<config.D>(shared.dS, shared.Q, p.dk_sum.data + row * padded_to_4(config.D), left);
    __syncthreads();
  }

  if (!p.dq.data) return;
#pragma unroll
  for (int r = 0; r < Kernel::rows; ++r) {
    const Int64 i = queries.begin + kernel.row0 + r * Kernel::row_step;
    if (i < s.nq)
      kernel.template store_row<config.D>(kernel.dQ[r], p.x.scale,
                                          row_of<config.dq>(p.dq, place.b, s.q_begin + i, place.h));
  }
}

}  // namespace tessera::ladder
