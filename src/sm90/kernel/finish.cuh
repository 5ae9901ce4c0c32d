// SPDX-License-Identifier: Apache-2.0
// dQ from the sums that the one-pass backward kernel leaves in memory: a warpgroup for each part of a tile. Where sums
// begin with the first block of keys, a tile that no key sees has none; its dQ is 0. Device code.
#pragma once

#include "sm90/kernel/one_pass_work.cuh"
#include "sm90/ptx/barrier.cuh"
#include "sm90/tile/accumulator.cuh"

namespace tessera::sm90 {

template <OnePassConfig config, Element dQ>
__device__ void finish(const FinishParams& p) {
  wait_for_kernel_before();
  gpu::QueryPlace place;
  if (!gpu::query_place(p.call.x, config.block_queries, place)) return;
  const int part = threadIdx.x / 128, thread = threadIdx.x % 128;
  const Int64 tile = tile_number<config>(p.memory, p.call.x, place);
  const float* from = p.memory.sums + (tile * parts_of(config) + part) * part_numbers + 4 * thread;
  const int column = part_column(config, part);
  const bool summed = !config.ordered || p.memory.counts[tile] > 0;
  Int64 tokens[2];
  bool exists[2];
  for (int r = 0; r < 2; ++r) {
    const Int64 i = place.first + part_row(config, part) + accumulator_row(thread, 2 * r);
    tokens[r] = place.s.q_begin + i, exists[r] = i < place.s.nq;
  }
  float sums[32];
#pragma unroll
  for (int n = 0; n < 32; n += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + 128 * n);
    const float x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[n + e] = summed ? x[e] * p.call.x.scale : 0;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    auto* row = gpu::row_of<dQ>(p.call.dq, place.b, tokens[r], place.h) + column;
    if constexpr (dQ == Element::f32)  // no other type accumulates
      if (p.call.accumulate) add_row<64>(sums, r, thread, row, p.D - column, exists[r]);
    store_row<dQ, 64>(sums, r, thread, row, p.D - column, exists[r]);
  }
}

}  // namespace tessera::sm90
