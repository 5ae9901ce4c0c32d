// SPDX-License-Identifier: Apache-2.0
// What the one-pass backward kernel begins with: delta = rowsum(dO * O) - dLSE, LSE in units of log2(e), and zeros
// where it will count and add. Rows that see no key get delta 0 and LSE +inf, so that their P = exp(S - LSE) is 0. A
// few lanes per row, 16 bytes of it each. Device code; implements docs/algorithm.md, "Backward, tile by tile".
#pragma once

#include "gpu/kernel/common.cuh"
#include "gpu/kernel/lanes.cuh"
#include "sm90/kernel/one_pass_work.cuh"
#include "sm90/ptx/barrier.cuh"
#include "sm90/ptx/math.cuh"

namespace tessera::sm90 {

// Elements `first` to `first` + 7 of a row; 0 from `count` on.
template <Element element>
__device__ inline void load_eight(const typename gpu::Stored<element>::Type* row, int first, int count, float (&x)[8]) {
  if (first + 8 <= count) {
    constexpr int words = element == Element::f32 ? 8 : 4;
    UInt32 bits[words];
#pragma unroll
    for (int n = 0; n < words; n += 4) {
      const uint4 four = reinterpret_cast<const uint4*>(row + first)[n / 4];
      bits[n] = four.x, bits[n + 1] = four.y, bits[n + 2] = four.z, bits[n + 3] = four.w;
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) x[n] = unpacked<element>(bits[n * words / 8] >> (words == 4 ? n % 2 * 16 : 0));
  } else {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      x[n] = 0;
      if (first + n >= count) continue;
      if constexpr (element == Element::f32)
        x[n] = row[first + n];
      else
        x[n] = unpacked<element>(row[first + n].bits);
    }
  }
}

// `lanes` share a row: a power of two, of 8 columns each.
template <OnePassConfig config, Element o, int lanes>
__device__ void prepare(const PrepareParams& p) {
  start_kernel_after();
  const Int64 thread = blockIdx.x * Int64(prepare_threads) + threadIdx.x, threads = gridDim.x * Int64(prepare_threads);
  for (Int64 n = thread; n < p.memory.blocks; n += threads)
    static_cast<OnePassWork<config>*>(p.memory.works)[n].find(p.call.x, p.order, n);
  for (Int64 n = thread; n < p.zeros; n += threads) static_cast<uint4*>(p.zero)[n] = uint4{0, 0, 0, 0};

  gpu::QueryPlace place;
  if (!gpu::query_place(p.call.x, config.block_queries, place)) return;
  constexpr int at_once = prepare_threads / lanes, rounds = config.block_queries / at_once;
  const int lane = threadIdx.x % lanes, row = threadIdx.x / lanes;
  float sum[rounds] = {}, lse[rounds];
#pragma unroll
  for (int r = 0; r < rounds; ++r) {  // no round waits for the one before
    const Int64 i = place.first + row + r * at_once, token = place.s.q_begin + i;
    lse[r] = minus_infinity<float>;
    if (i >= place.s.nq) continue;
    lse[r] = *gpu::number_of(p.call.lse, place.b, token, place.h);
    float x[8], y[8];
    load_eight<o>(gpu::row_of<o>(p.call.o, place.b, token, place.h), 8 * lane, p.Dv, x);
    load_eight<config.element>(gpu::row_of<config.element>(p.call.d_o, place.b, token, place.h), 8 * lane, p.Dv, y);
#pragma unroll
    for (int n = 0; n < 8; ++n) sum[r] = fmaf(x[n], y[n], sum[r]);
  }
  float* numbers = p.memory.numbers + tile_number<config>(p.memory, p.call.x, place) * numbers_of(config);
  bool blind = false;
#pragma unroll
  for (int r = 0; r < rounds; ++r) {
    sum[r] = gpu::sum_over_lanes<lanes>(sum[r]);
    const Int64 i = place.first + row + r * at_once, token = place.s.q_begin + i;
    const bool sees = lse[r] != minus_infinity<float>;
    blind |= !sees;
    if (lane > 0) continue;
    const float d_lse = sees && p.call.d_lse.data ? *gpu::number_of(p.call.d_lse, place.b, token, place.h) : 0;
    const float delta = sees ? sum[r] - d_lse : 0, lse2 = sees ? lse[r] * log2e<float> : -minus_infinity<float>;
    numbers[row + r * at_once] = lse2, numbers[delta_at(config) + row + r * at_once] = delta;
    if (i >= place.s.nq) continue;
    const Int64 at = place.h * p.call.row_head + place.b * p.call.row_batch + token;
    p.call.delta[at] = delta, p.call.lse2[at] = lse2;
  }
  blind = __syncthreads_or(blind);
  if (threadIdx.x == 0) numbers[blind_at(config)] = blind;
}

}  // namespace tessera::sm90
