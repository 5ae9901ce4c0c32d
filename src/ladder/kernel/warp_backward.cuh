// SPDX-License-Identifier: Apache-2.0
// The ladder's rung `warp`, backward: a warp owns a few keys and keeps their k, v, dK and dV in registers, distributed
// over its lanes. Queries are streamed through shared memory. Every q.k and dO.v is a butterfly reduction over the
// warp, after which all lanes have P and dS. dQ of a row is summed over the warps in a fixed order and added to a copy
// in the workspace that only this block writes: no atomics, so deterministic. Device code; implements
// docs/algorithm.md, "Backward".
#pragma once

#include "ladder/kernel/rows.cuh"

namespace tessera::ladder {

template <Config config>
struct WarpBackward {
  static constexpr int warps = config.threads / 32, rows = config.block_rows;
  static constexpr int keys = config.block_cols / warps;  // of a warp
  static constexpr int groups = warp_width(config.D) / 32, groups_v = warp_width(config.Dv) / 32;
  using Shared = WarpBackwardShared<config>;
  static_assert(sizeof(Shared) == warp_backward_shared_bytes(config));
  static_assert(longest_chain % rows == 0);

  Shared& shared;
  const BackwardParams& p;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float k[keys][groups], v[keys][groups_v];
  float dK[keys][groups], dV[keys][groups_v];            // finished partial sums
  float dK_part[keys][groups], dV_part[keys][groups_v];  // the current partial sums

  __device__ WarpBackward(Shared& shared, const BackwardParams& p) : shared(shared), p(p) {}

  // A lane takes every 32nd element of a row (coalesced); elements beyond D, or of an unused row, are 0.
  template <int D, int n, class T>
  __device__ void load_row(const T* row, bool is_used, float (&to)[n]) const {
#pragma unroll
    for (int g = 0; g < n; ++g) to[g] = is_used && lane + 32 * g < D ? to_float(row[lane + 32 * g]) : 0.0f;
  }

  // The warp's keys, the first of which is number `first` of the sequence.
  __device__ void load_keys(const QueryPlace& place, Int64 first) {
#pragma unroll
    for (int n = 0; n < keys; ++n) {
      const bool is_used = first + n < place.s.nk;
      load_row<config.D>(key_row<config.element>(p.x.k, place, first + n), is_used, k[n]);
      load_row<config.Dv>(key_row<config.element>(p.x.v, place, first + n), is_used, v[n]);
#pragma unroll
      for (int g = 0; g < groups; ++g) dK[n][g] = dK_part[n][g] = 0;
#pragma unroll
      for (int g = 0; g < groups_v; ++g) dV[n][g] = dV_part[n][g] = 0;
    }
  }

  // Loads `count` queries from `first` on, one row per warp. Queries that see no key have LSE = +inf here; their q and
  // dO may hold NaN and are replaced by 0.
  __device__ void load_queries(const QueryPlace& place, Int32 h, Int64 first, int count) {
    for (int r = warp; r < count; r += warps) {
      const Int64 token = place.s.q_begin + first + r, at = h * p.row_head + place.b * p.row_batch + token;
      const float lse2 = p.lse2[at];
      const bool is_used = lse2 != -minus_infinity<float>;
      float q[groups], d_o[groups_v];
      load_row<config.D>(row_of<config.element>(p.x.q, place.b, token, h), is_used, q);
      load_row<config.Dv>(row_of<config.d_o>(p.d_o, place.b, token, h), is_used, d_o);
#pragma unroll
      for (int g = 0; g < groups; ++g) shared.Q[r][lane + 32 * g] = q[g];
#pragma unroll
      for (int g = 0; g < groups_v; ++g) shared.dO[r][lane + 32 * g] = d_o[g];
      if (lane == 0) shared.lse2[r] = lse2, shared.delta[r] = p.delta[at];
    }
  }

  // Contributions of query row r and the warp's keys to dK, dV and dQ.
  __device__ void add_row(int r, const TileMask& mask) {
    float q[groups], d_o[groups_v], products[2 * keys] = {};  // S, then dP
#pragma unroll
    for (int g = 0; g < groups; ++g) q[g] = shared.Q[r][lane + 32 * g];
#pragma unroll
    for (int g = 0; g < groups_v; ++g) d_o[g] = shared.dO[r][lane + 32 * g];
#pragma unroll
    for (int n = 0; n < keys; ++n) {
#pragma unroll
      for (int g = 0; g < groups; ++g) products[n] = fmaf(q[g], k[n][g], products[n]);
#pragma unroll
      for (int g = 0; g < groups_v; ++g) products[keys + n] = fmaf(d_o[g], v[n][g], products[keys + n]);
    }
    sum_over_lanes<32>(products);

    float P[keys], dS[keys];
    const float lse2 = shared.lse2[r], delta = shared.delta[r];
#pragma unroll
    for (int n = 0; n < keys; ++n) {
      const bool seen = lse2 != -minus_infinity<float> && mask.visible(r, warp * keys + n);
      P[n] = seen ? exp2f(fmaf(products[n], p.x.score_scale * log2e<float>, -lse2)) : 0;
      dS[n] = seen ? P[n] * (products[keys + n] - delta) : 0;
    }
    if (p.dv.data) add_to_keys(P, d_o, dV_part);
    if (p.dk.data) add_to_keys(dS, q, dK_part);
    if (p.dq_sum.data) {
#pragma unroll
      for (int g = 0; g < groups; ++g) {
        float dQ = 0;
#pragma unroll
        for (int n = 0; n < keys; ++n) dQ = fmaf(dS[n], k[n][g], dQ);
        shared.dQ[warp][r][lane + 32 * g] = dQ;
      }
    }
  }

  // part[n] += factor[n] row: dV += P dO, dK += dS q.
  template <int width>
  __device__ void add_to_keys(const float (&factor)[keys], const float (&row)[width],
                              float (&part)[keys][width]) const {
#pragma unroll
    for (int n = 0; n < keys; ++n)
#pragma unroll
      for (int g = 0; g < width; ++g) part[n][g] = fmaf(factor[n], row[g], part[n][g]);
  }

  // Adds the warps' partial sums of dQ, in a fixed order, to rows of this block's copy.
  __device__ void add_dQ(float* copy, int count) const {
    for (int n = threadIdx.x; n < count * config.D; n += config.threads) {
      const int r = n / config.D, d = n % config.D;
      float sum = 0;
#pragma unroll
      for (int w = 0; w < warps; ++w) sum += shared.dQ[w][r][d];
      copy[r * padded_to_4(config.D) + d] += sum;
    }
  }

  // Ends the partial sums of dK and dV: accumulators that ran longer would drift (see longest_chain).
  __device__ void fold() {
#pragma unroll
    for (int n = 0; n < keys; ++n) {
#pragma unroll
      for (int g = 0; g < groups; ++g) dK[n][g] += dK_part[n][g], dK_part[n][g] = 0;
#pragma unroll
      for (int g = 0; g < groups_v; ++g) dV[n][g] += dV_part[n][g], dV_part[n][g] = 0;
    }
  }

  template <int D, int n, class T>
  __device__ void store_row(const float (&row)[n], float factor, T* out) const {
#pragma unroll
    for (int g = 0; g < n; ++g)
      if (lane + 32 * g < D) from_float(row[g] * factor, out[lane + 32 * g]);
  }

  __device__ void store_keys(const QueryPlace& place, Int64 first) const {
#pragma unroll
    for (int n = 0; n < keys; ++n) {
      const Int64 token = place.s.k_begin + first + n;
      if (first + n >= place.s.nk) return;
      if (p.dk.data) store_row<config.D>(dK[n], p.x.scale, row_of<config.dk>(p.dk, place.b, token, place.kv));
      if (p.dv.data) store_row<config.Dv>(dV[n], 1, row_of<config.dv>(p.dv, place.b, token, place.kv));
    }
  }
};

// A block owns every `splits`-th tile of keys of one sequence and KV head. Which tiles a split owns depends on the
// sequence alone, and so do the bits of dQ. The copies of splits without a tile stay 0.
template <Config config>
__device__ void warp_backward(const BackwardParams& p) {
  using Kernel = WarpBackward<config>;
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(memory);
  const Int32 group = p.x.Hq / p.x.Hk, splits = Int32(gridDim.x / (Int64(p.x.B) * p.x.Hk));
  QueryPlace place;
  place.kv = Int32(blockIdx.x % p.x.Hk), place.h = place.kv * group;
  const Int32 split = Int32(blockIdx.x / p.x.Hk % splits);
  place.b = Int32(blockIdx.x / p.x.Hk / splits);
  place.s = sequence_of(p.x, place.b);
  const DeviceSequence& s = place.s;
  Kernel kernel(shared, p);

  for (place.first = split * config.block_cols; place.first < s.nk; place.first += splits * config.block_cols) {
    const Range keys{place.first, place.first + config.block_cols};
    kernel.load_keys(place, keys.begin + kernel.warp * Kernel::keys);
    const Range tiles = tiles_of(visible_queries(s.mask, keys), Kernel::rows);
    for (Int32 h = place.h; h < place.h + group; ++h) {
      for (Int64 n = tiles.begin; n < tiles.end; ++n) {
        const Range queries{n * Kernel::rows, lesser((n + 1) * Kernel::rows, s.nq)};
        const int count = int(queries.size());
        kernel.load_queries(place, h, queries.begin, count);
        __syncthreads();  // also: the previous partial sums of dQ have been read
        const TileMask mask(s.mask, queries.begin, keys.begin);
#pragma unroll 1
        for (int r = 0; r < count; ++r) kernel.add_row(r, mask);
        __syncthreads();
        if (p.dq_sum.data) {
          const Int64 row = h * p.row_head + place.b * p.row_batch + s.q_begin + queries.begin;
          kernel.add_dQ(p.dq_sum.data + split * p.dq_sum.copy + row * padded_to_4(config.D), count);
        }
        if ((n + 1) * Kernel::rows % longest_chain == 0) kernel.fold();
      }
      kernel.fold();
    }
    kernel.store_keys(place, keys.begin + kernel.warp * Kernel::keys);
  }
}

}  // namespace tessera::ladder
