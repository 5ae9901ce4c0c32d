// The ladder's general rung, forward: tiles of K and V in shared memory, products blocked in registers, loads
// overlapped with arithmetic: V of this tile arrives while S is computed, K of the next while O is. Every option of the
// contract. Device text; implements docs/algorithm.md, "Online softmax".
#pragma once

#include "simt/kernel/product.cuh"
#include "simt/kernel/scores.cuh"

namespace tessera::simt {

template <Config config>
struct VectorForward {
  static constexpr int D = padded_to_4(config.D), Dv = padded_to_64(config.Dv);
  static constexpr int rows = config.rows_per_thread, cols = config.block_cols / lanes_per_row;
  static constexpr int groups = Dv / (4 * lanes_per_row);  // of four columns of O
  using Shared = VectorForwardShared<config>;
  static_assert(sizeof(Shared) == vector_forward_shared_bytes(config));
  static_assert(config.block_rows == config.threads / lanes_per_row * rows);

  Shared& shared;
  const int row0 = threadIdx.x / lanes_per_row * rows, lane = threadIdx.x % lanes_per_row;
  float S[rows][cols];
  float O[rows][4 * groups];
  float m[rows], l[rows], lost[rows], alpha[rows];  // l with Kahan's compensation; this lane's share of the row

  __device__ explicit VectorForward(Shared& shared, float sink) : shared(shared) {
    // A sink is a key with the score `sink` and no value; one lane counts it.
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      m[r] = sink, lost[r] = 0;
      l[r] = lane == 0 && sink != minus_infinity<float> ? 1 : 0;
#pragma unroll
      for (int d = 0; d < 4 * groups; ++d) O[r][d] = 0;
    }
  }

  // S = Q K^T. Lane n has the keys n, n + 16, ...
  __device__ void multiply_QK() { multiply_over_dims<D>(shared.Q, shared.K, row0, lane, S); }

  // Scores become P; m, l and alpha take the tile in. P goes to shared memory, times the dropout factors.
  __device__ void softmax(const ScoreOf<config>& score, Int64 i0, Int64 j0, bool masked) {
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const Int64 i = i0 + row0 + r;
      float top = m[r];
#pragma unroll
      for (int c = 0; c < cols; ++c) {
        S[r][c] = score(S[r][c], i, j0 + lane + lanes_per_row * c, masked);
        top = fmaxf(top, S[r][c]);
      }
      top = row_max(top);
      const float base = exponent_base(top);
      alpha[r] = exp2f(m[r] - base);
      m[r] = top;
      float sum = 0;
#pragma unroll
      for (int c = 0; c < cols; ++c) {
        float P = exp2f(S[r][c] - base);
        sum += P;
        if constexpr (config.dropout) P *= score.keep(i, j0 + lane + lanes_per_row * c);
        shared.P[row0 + r][lane + lanes_per_row * c] = P;
      }
      const float before = l[r] * alpha[r], term = sum - lost[r] * alpha[r];
      l[r] = before + term;
      lost[r] = (l[r] - before) - term;
    }
    __syncwarp();  // rows of P are read by the half warp that wrote them
  }

  // O = alpha O + P V.
  __device__ void multiply_PV() { multiply_over_columns<config.block_cols>(shared.P, shared.V, row0, lane, alpha, O); }

  // O / l and LSE.
  __device__ void finish(const ForwardParams& p, const QueryPlace& place) const {
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const float sum = row_sum(l[r]);  // every lane of the warp takes part
      const Int64 i = place.first + row0 + r, token = place.s.q_begin + i;
      if (i >= place.s.nq) continue;
      const float inverse = sum == 0 ? 0 : 1 / sum;
      store_row<config.Dv>(O[r], lane, inverse, false, row_of<config.o>(p.o, place.b, token, place.h));
      if (lane == 0 && p.lse.data)
        *number_of(p.lse, place.b, token, place.h) = log_sum_exp(m[r], sum, [](float y) { return log2f(y); }) * ln2;
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
  const ScoreOf<config> score(p.x, s, place.b, place.h);
  const float sink = p.x.sinks ? p.x.sinks[place.h * p.x.sink_head] * log2e : minus_infinity<float>;
  Kernel kernel(shared, sink);

  const Range queries{place.first, lesser(place.first + config.block_rows, s.nq)};
  const Range seen = visible_keys(s.mask, queries);
  constexpr Int64 block = config.block_cols;
  const Int64 first = seen.begin / block, end = seen.empty() ? first : ceil_div(seen.end, block);
  const auto load_K = [&](Int64 n) {
    load_tile<config, config.element, Kernel::D, config.D>(shared.K, p.x.k, place.b, s.k_begin + n * block,
                                                           s.nk - n * block, place.kv);
  };
  const auto load_V = [&](Int64 n) {
    load_tile<config, config.element, Kernel::Dv, config.Dv>(shared.V, p.x.v, place.b, s.k_begin + n * block,
                                                             s.nk - n * block, place.kv);
  };

  load_tile<config, config.element, Kernel::D, config.D>(shared.Q, p.x.q, place.b, s.q_begin + place.first,
                                                         queries.size(), place.h);
  commit_copies();
  wait_copies<0>();
  __syncthreads();
  for (int n = threadIdx.x; n < config.block_rows * Kernel::D; n += config.threads)
    shared.Q[n / Kernel::D][n % Kernel::D] *= score.q_factor();
  if (first < end) load_K(first);
  commit_copies();

  for (Int64 n = first; n < end; ++n) {
    load_V(n);
    commit_copies();
    wait_copies<1>();  // K of this tile; V is still on its way
    __syncthreads();
    kernel.multiply_QK();
    __syncthreads();  // nobody reads this K any more
    if (n + 1 < end) load_K(n + 1);
    commit_copies();
    const Range keys{n * block, (n + 1) * block};
    kernel.softmax(score, place.first, keys.begin, tile_class(s.mask, queries, keys) != TileClass::full);
    wait_copies<1>();  // V of this tile; K of the next is still on its way
    __syncthreads();
    kernel.multiply_PV();
    __syncthreads();  // nobody reads this V any more
  }
  kernel.finish(p, place);
}

}  // namespace tessera::simt
