// SPDX-License-Identifier: Apache-2.0
// What a backward pass finds at 0. `clear`: gradient rows that no sequence uses (padding behind used lengths, gaps
// between packed sequences), a warp per row and head; the other kernels write the rows that are used. `clear_sums`: the
// accumulators in the workspace. Device code; docs/algorithm.md, "Backward, tile by tile".
#pragma once

#include "gpu/kernel/common.cuh"

namespace tessera::gpu {

// Is token `token` (of sequence b if padded) a row of some sequence? `keys`: of K's side, else of Q's.
__device__ inline bool is_used(const Question& x, Int32 b, Int64 token, bool keys) {
  if (x.B == 0) return false;
  if (x.cu_seqlens_q.data) {  // the last sequence that begins at or before the token
    const LengthRef& cu_seqlens = keys ? x.cu_seqlens_k : x.cu_seqlens_q;
    Int32 end = x.B;
    for (b = 0; end - b > 1;) {
      const Int32 middle = b + (end - b) / 2;
      (packed_begin(cu_seqlens, middle, keys ? x.Nk : x.Nq) <= token ? b : end) = middle;
    }
  }
  const DeviceSequence s = sequence_of(x, b);
  const Int64 row = token - (keys ? s.k_begin : s.q_begin);
  return 0 <= row && row < (keys ? s.nk : s.nq);
}

template <Element element>
__device__ void clear_rows(const Question& x, const TokenRef& t, Int64 row, bool keys, int width) {
  const Int64 tokens = keys ? x.Nk : x.Nq;
  const Int32 heads = keys ? x.Hk : x.Hq;
  if (!t.data || row >= heads * tokens * (x.cu_seqlens_q.data ? 1 : x.B)) return;
  const Int32 b = Int32(row / heads / tokens), h = Int32(row % heads);
  const Int64 token = row / heads % tokens;
  if (is_used(x, b, token, keys)) return;
  auto* out = row_of<element>(t, b, token, h);
  for (int d = threadIdx.x % 32; d < width; d += 32) from_float(0, out[d]);
}

template <RowConfig config>
__device__ void clear(const BackwardParams& p) {
  const Int64 row = (Int64(blockIdx.x) * config.threads + threadIdx.x) / 32;
  clear_rows<config.dq>(p.x, p.dq, row, false, config.D);
  clear_rows<config.dk>(p.x, p.dk, row, true, config.D);
  clear_rows<config.dv>(p.x, p.dv, row, true, config.Dv);
}

// Sums begin at multiples of 16 bytes and consist of rows of padded_to_4(D) numbers, so nothing is left over.
__device__ inline void clear_sum(const Sum& sum, Int64 thread, Int64 threads) {
  auto* data = reinterpret_cast<float4*>(sum.data);
  for (Int64 n = thread; n < sum.copies * sum.copy / 4; n += threads) data[n] = float4{0, 0, 0, 0};
}

template <RowConfig config>
__device__ void clear_sums(const BackwardParams& p) {
  const Int64 thread = Int64(blockIdx.x) * config.threads + threadIdx.x, threads = Int64(gridDim.x) * config.threads;
  clear_sum(p.dq_sum, thread, threads);
  clear_sum(p.dk_sum, thread, threads);
  clear_sum(p.dv_sum, thread, threads);
}

}  // namespace tessera::gpu
