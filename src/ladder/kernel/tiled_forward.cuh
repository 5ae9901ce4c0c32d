// SPDX-License-Identifier: Apache-2.0
// The ladder's second rung, forward: tiles of Q, K, V and of the scores in shared memory, and __syncthreads() after
// every step. Device code; implements docs/algorithm.md, "Online softmax".
#pragma once

#include "ladder/kernel/tiled.cuh"

namespace tessera::ladder {

template <Config config>
struct TiledForward : TiledThread<config> {
  using Thread = TiledThread<config>;
  using Thread::cols, Thread::rows, Thread::column, Thread::row0, Thread::row_step;
  static constexpr int groups = tiled_width(config, config.Dv) / cols;  // of columns of O

  // In the softmax a row is shared by neighbouring lanes of one warp, so that it is reduced by warp shuffles.
  static constexpr int row_lanes = config.threads / config.block_rows, row_cols = cols / row_lanes;
  using Shared = TiledForwardShared<config>;
  static_assert(sizeof(Shared) == tiled_forward_shared_bytes(config));

  Shared& shared;
  const int softmax_row = threadIdx.x / row_lanes, softmax_lane = threadIdx.x % row_lanes;
  SoftmaxRow state;            // of softmax_row
  float O[rows][groups] = {};  // of the thread's rows

  __device__ explicit TiledForward(Shared& shared) : shared(shared) {}

  // S = Q K^T.
  __device__ void multiply_QK() {
    float S[rows];
    this->template multiply_over_dims<config.D>(shared.Q, shared.K, S);
#pragma unroll
    for (int r = 0; r < rows; ++r) shared.S[row0 + r * row_step][column] = S[r];
  }

  // One step of online softmax: scores become P in place; m and l are updated, alpha rescales O.
  __device__ void softmax(const TileMask& mask) {
    float S[row_cols], top[1] = {minus_infinity<float>}, sum[1] = {0};
#pragma unroll
    for (int c = 0; c < row_cols; ++c) {
      const int j = softmax_lane + c * row_lanes;
      S[c] = mask.visible(softmax_row, j) ? shared.S[softmax_row][j] : minus_infinity<float>;
      top[0] = fmaxf(top[0], S[c]);
    }
    max_over_lanes<row_lanes>(top);
    const float alpha = state.raise(top[0]);
#pragma unroll
    for (int c = 0; c < row_cols; ++c) {
      const float P = state.P(S[c]);
      shared.S[softmax_row][softmax_lane + c * row_lanes] = P;
      sum[0] += P;
    }
    sum_over_lanes<row_lanes>(sum);
    state.add(sum[0]);
    if (softmax_lane == 0) shared.factor[softmax_row] = alpha;
  }

  // O = alpha O + P V.
  __device__ void multiply_PV() {
    float alpha[rows];
#pragma unroll
    for (int r = 0; r < rows; ++r) alpha[r] = shared.factor[row0 + r * row_step];
    this->multiply_over_keys(shared.S, shared.V, alpha, O);
  }

  // Epilogue: stores O / l and LSE.
  __device__ void finish(const ForwardParams& p, const QueryPlace& place) const {
    const Int64 token = place.s.q_begin + place.first, left = place.s.nq - place.first;
    if (softmax_lane == 0) {
      shared.factor[softmax_row] = state.inverse();
      if (p.lse.data && softmax_row < left) *number_of(p.lse, place.b, token + softmax_row, place.h) = state.lse();
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const int row = row0 + r * row_step;
      if (row < left)
        this->template store_row<config.Dv>(O[r], shared.factor[row],
                                            row_of<config.o>(p.o, place.b, token + row, place.h));
    }
  }
};

template <Config config>
__device__ void tiled_forward(const ForwardParams& p) {
  using Kernel = TiledForward<config>;
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

  const Range tiles = tiles_of(visible_keys(s.mask, queries), config.block_cols);
  for (Int64 n = tiles.begin; n < tiles.end; ++n) {
    const Range keys{n * config.block_cols, (n + 1) * config.block_cols};
    load_keys<config>(shared, p.x, place, keys.begin);
    __syncthreads();
    kernel.multiply_QK();
    __syncthreads();
    kernel.softmax(TileMask(s.mask, queries.begin, keys.begin));
    __syncthreads();
    kernel.multiply_PV();
    __syncthreads();
  }
  kernel.finish(p, place);
}

}  // namespace tessera::ladder
