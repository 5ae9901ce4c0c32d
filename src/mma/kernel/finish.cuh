// SPDX-License-Identifier: Apache-2.0
// dQ from the sums that the `mma` one-pass backward kernel leaves in memory: a block for each tile of queries, whose
// warps have the parts that the warps of the pass had. Where sums begin with the first block of keys, a tile that no
// key sees has none; its dQ is 0. Device code.
#pragma once

#include "gpu/kernel/accumulator.cuh"
#include "mma/one_pass_config.hpp"
#include "mma/params.hpp"
#include "mma/ptx/reduce.cuh"

namespace tessera::mma {

template <FinishConfig config>
__device__ void finish(const FinishParams& p) {
  constexpr QuerySums sums = config.sums();
  constexpr int R = QuerySums::row_tiles, values = sums.columns() / 2;
  gpu::QueryPlace place;
  if (!gpu::query_place(p.call.x, config.queries, place)) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Int64 tile = place.h * Int64(p.memory.tiles_per_head) +
                     gpu::first_block(p.call.x.cu_seqlens_q, place.b, config.queries, p.call.x.Nq) +
                     place.first / config.queries;
  const bool summed = !config.ordered || p.memory.counts[tile] > 0;
  const float* from = p.memory.sums + tile * sums.tile_numbers() + warp * sums.part_numbers();
  float dQ[R][values];
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int n = 0; n < values; n += 4) {
      load_sums(from + 32 * (r * values + n), lane, &dQ[r][n]);
#pragma unroll
      for (int e = 0; e < 4; ++e) dQ[r][n + e] = summed ? dQ[r][n + e] * p.call.x.scale : 0;
    }
  const int column = sums.first_column(warp), count = p.D - column < sums.columns() ? p.D - column : sums.columns();
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const Int64 i = place.first + sums.first_row(warp) + 16 * r + gpu::accumulator_row(lane, 2 * e);
      auto* row = gpu::row_of<config.dQ>(p.call.dq, place.b, place.s.q_begin + i, place.h) + column;
      if constexpr (config.dQ == Element::f32)  // no other type accumulates
        if (p.call.accumulate) gpu::add_row<2 * values>(dQ[r], e, lane, row, count, i < place.s.nq);
      gpu::store_row<config.dQ, 2 * values>(dQ[r], e, lane, row, count, i < place.s.nq);
    }
}

}  // namespace tessera::mma
