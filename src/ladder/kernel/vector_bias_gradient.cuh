// SPDX-License-Identifier: Apache-2.0
// dBias of `vector`: a block owns a tile of dBias and reduces dS over every dimension along which the bias was
// broadcast (sequences, heads, rows, keys), in a fixed order, so deterministic. Device code; implements
// docs/algorithm.md, "Backward".
#pragma once

#include "ladder/kernel/vector_backward.cuh"
#include "math/compensated.hpp"

namespace tessera::ladder {

// The range of one dimension that a block of dBias reduces over: its own tile, or all of it if the bias was broadcast.
constexpr Range terms_of(bool broadcast, Int64 first, Int64 block, Int64 length) {
  return broadcast ? Range{0, length} : Range{first, lesser(first + block, length)};
}

// The tile of sums in shared memory. It aliases the operands, which are no longer needed by then.
template <Config config>
using BiasTile = float[config.block_rows][config.block_cols + 1];

template <Config config>
__device__ void store_bias_tile(const BackwardParams& p, const BiasTile<config>& sums, Int64 b, Int64 h, Int64 i0,
                                Int64 j0) {
  using T = typename Stored<config.dbias>::Type;
  const bool one_row = p.dbias_rows == 1, one_key = p.dbias_keys == 1;
  const int rows = one_row ? 1 : config.block_rows, keys = one_key ? 1 : config.block_cols;
  for (int n = threadIdx.x; n < rows * keys; n += config.threads) {
    const int row = n / keys, key = n % keys;
    if (i0 + row >= p.dbias_rows || j0 + key >= p.dbias_keys) continue;
    double sum = 0;
    for (int r = row; r < (one_row ? config.block_rows : row + 1); ++r)
      for (int c = key; c < (one_key ? config.block_cols : key + 1); ++c) sum += sums[r][c];
    T& out = static_cast<T*>(
        p.dbias.data)[b * p.dbias.batch + h * p.dbias.head + (i0 + row) * p.dbias.row + (j0 + key) * p.dbias.key];
    from_float(float(sum) + (p.accumulate ? to_float(out) : 0.0f), out);
  }
}

template <Config config>
__device__ void vector_bias_gradient(const BackwardParams& p) {
  using Kernel = VectorBackward<config, Side::queries>;
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(memory);
  static_assert(sizeof(BiasTile<config>) <= sizeof(shared.row_QK) && config.stages == 1);
  // Kahan's compensation terms live in shared memory because of register pressure. They alias P, which only
  // over_columns() uses.
  auto& lost = shared.P;
  const Question& x = p.x;

  // Block index to tile: keys vary fastest, then rows, heads, sequences.
  const Int64 key_tiles = ceil_div(p.dbias_keys, config.block_cols),
              row_tiles = ceil_div(p.dbias_rows, config.block_rows);
  const Int64 j0 = blockIdx.x % key_tiles * config.block_cols,
              i0 = blockIdx.x / key_tiles % row_tiles * config.block_rows;
  const Int32 slice = Int32(blockIdx.x / (key_tiles * row_tiles)), h0 = slice % p.dbias_heads,
              b0 = slice / p.dbias_heads;

  QueryPlace place{};
  Kernel kernel(shared, p, place);
  float sum[Kernel::rows][Kernel::cols] = {};
  kernel.for_each([&](int, int, int row, int col) { lost[row][col] = 0; });  // each thread reads and writes its own
  const auto add_tile = [&](Int64 key) {
    __syncthreads();  // all warps are done with the previous tiles
    kernel.load_queries(shared.row_QK, shared.row_VO, shared.lse2[0], shared.delta[0], place.first, place.h);
    kernel.load_keys(shared.column_QK[0], shared.column_VO[0], key);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    kernel.clear_blind_queries(shared.row_QK, shared.row_VO, 0);
    const ScoreOf<config.options> score(x, place.s, place.b, place.h);
    kernel.template recompute<true>(score, ScoreTile(place.s, place.first, config.block_rows, key, config.block_cols),
                                    0);
    kernel.for_each(
        [&](int r, int c, int row, int col) { add_compensated(sum[r][c], lost[row][col], kernel.dS[r][c]); });
  };

  const Range batches = terms_of(p.dbias_batches == 1, b0, 1, x.B), heads = terms_of(p.dbias_heads == 1, h0, 1, x.Hq);
  for (place.b = Int32(batches.begin); place.b < batches.end; ++place.b) {
    place.s = sequence_of(x, place.b);
    const Range rows = terms_of(p.dbias_rows == 1, i0, config.block_rows, place.s.nq);
    const Range keys = terms_of(p.dbias_keys == 1, j0, config.block_cols, place.s.nk);
    for (place.h = Int32(heads.begin); place.h < heads.end; ++place.h) {
      place.kv = place.h / (x.Hq / x.Hk);
      for (place.first = rows.begin; place.first < rows.end; place.first += config.block_rows)
        for (Int64 key = keys.begin; key < keys.end; key += config.block_cols) {
          const Range queries{place.first, lesser(place.first + config.block_rows, place.s.nq)};
          if (tile_class(place.s.mask, queries, {key, key + config.block_cols}) != TileClass::empty) add_tile(key);
        }
    }
  }

  auto& sums = *reinterpret_cast<BiasTile<config>*>(memory);
  __syncthreads();
  kernel.for_each([&](int r, int c, int row, int col) { sums[row][col] = sum[r][c]; });
  __syncthreads();
  store_bias_tile<config>(p, sums, b0, h0, i0, j0);
}

}  // namespace tessera::ladder
