// SPDX-License-Identifier: Apache-2.0
// dBias = ds, summed over the dimensions in which bias is broadcast; docs/algorithm.md, "Gradient of the bias". Each
// element has one owner that adds its terms in a fixed order: deterministic without atomics, and no memory is needed
// beyond a tile, at the price of recomputing S and dP. Included by cpu/isa/*.cpp inside their target region.
#pragma once

// Sums of one job: a tile for a bias with both dimensions, else sums along lanes or rows, in f64 since they may be
// long.
struct BiasSums {
  float* tile;  // [block_k][block_q]
  double row[block_k] = {}, lane[block_q] = {}, all = 0;
};

HWY_INLINE void add_tile(const BiasGradientJob& job, const Tile& tile, const float* dS, BiasSums& sums) {
  if (!job.sum_rows && !job.sum_keys) {
    float* out = sums.tile + (tile.j0 - job.keys.begin) * block_q;
    TESSERA_FOR_TILE(tile, j, i) {
      const Int64 at = j * block_q + i;
      store(hn::Add(load(out + at), load(dS + at)), out + at);
    }
    return;
  }
  for (Int64 j = 0; j < tile.nj; ++j)
    for (Int64 i = 0; i < tile.ni; ++i) {
      const double x = dS[j * block_q + i];
      if (job.sum_rows && job.sum_keys) sums.all += x;
      if (job.sum_rows && !job.sum_keys) sums.row[tile.j0 - job.keys.begin + j] += x;
      if (!job.sum_rows && job.sum_keys) sums.lane[i] += x;
    }
}

HWY_INLINE void write_sums(const BiasGradientJob& job, const BiasSums& sums) {
  const Range rows = job.sum_rows ? Range{0, 1} : job.rows, keys = job.sum_keys ? Range{0, 1} : job.keys;
  for (Int64 i = 0; i < rows.size(); ++i)
    for (Int64 j = 0; j < keys.size(); ++j) {
      double x = sums.all;
      if (!job.sum_rows && !job.sum_keys) x = double(sums.tile[j * block_q + i]);
      if (job.sum_rows && !job.sum_keys) x = sums.row[j];
      if (!job.sum_rows && job.sum_keys) x = sums.lane[i];
      const Int64 at = job.dbias.index(0, rows.begin + i, keys.begin + j);
      if (job.accumulate) x += load_element(job.dbias.base, job.dbias.type, at);
      store_element(job.dbias.base, job.dbias.type, at, x);
    }
}

HWY_NOINLINE void bias_gradient(const BiasGradientJob& job, Int64 D, Int64 Dv, float* memory) {
  Scratch pieces(memory);
  BackwardScratch s(D, Dv, pieces);
  BiasSums sums{.tile = pieces.take(block_k * block_q)};
  fill(sums.tile, block_k * block_q, 0);
  Nothing nothing;
  for (Int64 n = 0; n < job.heads; ++n) {
    const BackwardJob& head_job = *job.jobs[n];
    const HeadJob& head = head_job.head;
    for (Int64 q = job.rows.begin / block_q; q * block_q < lesser(job.rows.end, head.nq); ++q) {
      const Range queries = query_range(head, q);
      for (Int64 k = job.keys.begin / block_k; k * block_k < lesser(job.keys.end, head.nk); ++k) {
        const Range keys = key_range(head, queries, k);
        if (keys.empty()) continue;
        const Tile tile = tile_of(queries, keys);
        s.products.load_queries(head_job, tile);
        s.products.use_keys(s.products.load_keys(head, keys, false, 0));
        recompute(head_job, tile, 0, s, nothing);
        add_tile(job, tile, s.dS, sums);
      }
    }
  }
  write_sums(job, sums);
}

// dBias comes by multiply-adds, whatever computes the other gradients.
HWY_INLINE Int64 bias_gradient_bytes(const Problem& p) {
  return bytes_of<BackwardScratch>(p) + block_k * block_q * Int64(sizeof(float));
}
