// SPDX-License-Identifier: Apache-2.0
// What every GPU kernel is given, whatever its family: plain data, pointers with their shapes, strides in elements. And
// which block of a grid has which rows. Shared by host and device code, so it includes nothing but math.
#pragma once

#include "math/mask.hpp"
#include "math/philox.hpp"
#include "math/score.hpp"
#include "math/types.hpp"

namespace tessera::gpu {

// [B,N,H,D], or [T,H,D] with batch = 0. The last dimension has stride 1.
struct TokenRef {
  void* data;
  Int64 batch, token, head;
};

// [B,H,N], or [H,T] with batch = 0: LSE, dLSE.
struct RowRef {
  float* data;
  Int64 batch, head, row;
};

// [B|1,H|1,Nq|1,Nk|1], strides 0 where the size is 1: bias, mask.
struct PairRef {
  void* data;
  Int64 batch, head, row, key;
};

// [B+1] or [B]: cu_seqlens, seqused. Null where not given.
struct LengthRef {
  const Int32* data;
  Int64 stride;
  constexpr Int64 operator[](Int64 b) const { return data[b * stride]; }
};

// What both passes share.
struct Question {
  TokenRef q, k, v;
  Int32 B, Hq, Hk;
  float score_scale;  // of scores: `scale`, corrected for what a family's tensor cores cut off sums of products
  Int64 Nq, Nk;       // padded lengths, or the total token counts
  LengthRef cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;
  float scale;                        // the caller's: what dQ and dK are multiplied by
  ScoreParameters<float> parameters;  // of the options of scores
  Int32 causal, alignment;
  Int64 window_left, window_right, diagonal_offset, row0, col0, head0, batch0;
  PairRef bias, mask;
  // Of a sequence: what bias and mask, which the caller makes for the longest, have elements for.
  Int64 most_queries = BandMask::unbounded, most_keys = BandMask::unbounded;
  const float* slopes;  // [Hq] or [B,Hq]
  Int64 slope_batch, slope_head;
  const float* sinks;  // [Hq], or null
  Int64 sink_head;
  UInt32 dropout_threshold;
  float keep_scale;
  PhiloxKey key;     // of dropout, unless
  const Int64* rng;  // [2] is given: seed and offset in device memory
  Int64 rng_stride;
};

struct ForwardParams {
  Question x;
  TokenRef o;
  RowRef lse;  // data may be null
};

// Partial sums of a gradient in the workspace: `copies` arrays of rows of padded_to_4(D) numbers. Null where a rung has
// none.
struct Sum {
  float* data;
  Int64 copy;  // numbers between copies
  Int32 copies;
};

struct BackwardParams {
  Question x;
  TokenRef o, d_o;
  RowRef lse, d_lse;          // d_lse.data may be null
  TokenRef dq, dk, dv;        // data may be null
  float *delta, *lse2;        // workspace: row `token` of head h of sequence b at h * row_head + b * row_batch + token
  Int64 row_head, row_batch;  // packed: row_batch = 0
  Int64 key_head, key_batch;  // the same for rows of dk_sum and dv_sum
  Sum dq_sum, dk_sum, dv_sum;
  PairRef dbias;  // data may be null
  Int32 dbias_batches, dbias_heads;
  Int64 dbias_rows, dbias_keys;  // its shape
  float* dsinks;                 // [Hq], or null
  Int64 dsink_head;
  Int32 accumulate;
};

// One sequence of a question, as in core/sequence.hpp. Lengths are read on the device, where nobody can refuse them:
// whatever they hold, rows stay inside the tensors.
struct DeviceSequence {
  Int64 q_begin, k_begin, nq, nk, shift;
  BandMask mask;
};

// An entry of cu_seqlens, of N tokens, that is negative, beyond the tensor or smaller than the one before it has no
// meaning.
constexpr bool makes_sense(Int64 entry, Int64 before, Int64 N) {
  return 0 <= entry && entry <= N && (before <= entry || before > N);
}

// The tokens of sequence b of a packed tensor. A sequence that begins or ends with an entry without meaning has none.
constexpr Range packed_rows(const LengthRef& cu_seqlens, Int32 b, Int64 N) {
  const Int64 before = b > 0 ? cu_seqlens[b - 1] : 0, begin = cu_seqlens[b], end = cu_seqlens[b + 1];
  return makes_sense(begin, before, N) && makes_sense(end, begin, N) ? Range{begin, end} : Range{};
}

// Where sequence b begins. For an entry without meaning the one before it stands, so that a search finds its way to the
// other sequences.
constexpr Int64 packed_begin(const LengthRef& cu_seqlens, Int32 b, Int64 N) {
  const Int64 entry = cu_seqlens[b], before = b > 0 ? cu_seqlens[b - 1] : 0;
  return makes_sense(entry, before, N) ? entry : clamp(before, 0, N);
}

// What follows from a sequence's lengths: the diagonal and the band.
constexpr void set_band(const Question& x, DeviceSequence& s) {
  const Int64 off = diagonal_offset(x.alignment, s.nq, s.nk, x.diagonal_offset);
  s.shift = diagonal_shift(off, x.row0, x.col0);
  s.mask = band_mask(s.nq, s.nk, x.causal, x.window_left, x.window_right, off, x.row0, x.col0);
}

constexpr DeviceSequence sequence_of(const Question& x, Int32 b) {
  DeviceSequence s{0, 0, x.Nq, x.Nk, 0, {}};
  if (x.cu_seqlens_q.data) {
    const Range queries = packed_rows(x.cu_seqlens_q, b, x.Nq), keys = packed_rows(x.cu_seqlens_k, b, x.Nk);
    s.q_begin = queries.begin, s.nq = lesser(queries.size(), x.most_queries);
    s.k_begin = keys.begin, s.nk = lesser(keys.size(), x.most_keys);
  }
  if (x.seqused_q.data) s.nq = clamp(x.seqused_q[b], 0, s.nq);
  if (x.seqused_k.data) s.nk = clamp(x.seqused_k[b], 0, s.nk);
  set_band(x, s);
  return s;
}

// Blocks of `rows` queries (or keys) over all the sequences are numbered in one row, so that a grid needs one
// dimension. Padded: each sequence has ceil(N / rows) numbers. Packed: sequence b's numbers begin at
// floor(cu_seqlens[b] / rows) + b, which leaves every one of them room enough and is found by bisection.
constexpr Int64 block_count(bool packed, Int64 N, Int64 rows, Int64 B) {
  return B == 0 ? 0 : packed ? N / rows + B : B * ceil_div(N, rows);
}

constexpr Int64 first_block(const LengthRef& cu_seqlens, Int32 b, Int64 rows, Int64 N) {
  return cu_seqlens.data ? packed_begin(cu_seqlens, b, N) / rows + b : b * ceil_div(N, rows);
}

struct BlockPlace {
  Int32 b;
  Int64 first;  // row; N, where no sequence has any, for a number that is nobody's
};

// Numbers are nobody's before the first sequence and here and there between two. Where cu_seqlens are in disorder,
// bisection would find some blocks of a sequence and miss others, and whoever waits for a missed one would wait for
// ever. So the search keeps the interval of numbers that end at the same sequence: a sequence whose numbers are not all
// in it has none. Its blocks all come to that same conclusion.
constexpr BlockPlace place_of(Int64 number, Int64 rows, Int32 B, Int64 N, const LengthRef& cu_seqlens) {
  if (!cu_seqlens.data) return {Int32(number / ceil_div(N, rows)), number % ceil_div(N, rows) * rows};
  Int32 low = 0, high = B;
  Int64 begin = first_block(cu_seqlens, 0, rows, N), latest = begin, end = block_count(true, N, rows, B);
  while (high - low > 1) {
    const Int32 middle = low + (high - low) / 2;
    const Int64 middle_begin = first_block(cu_seqlens, middle, rows, N);
    if (middle_begin <= number)
      low = middle, begin = middle_begin, latest = greater(latest, begin);
    else
      high = middle, end = lesser(end, middle_begin);
  }
  const Int64 blocks = ceil_div(packed_rows(cu_seqlens, low, N).size(), rows);
  const bool own = begin <= number && latest == begin && begin + blocks <= end;
  return {low, own ? (number - begin) * rows : N};
}

// Whether place_of finds the blocks of sequence b.
constexpr bool finds_blocks(Int32 b, Int64 rows, Int32 B, Int64 N, const LengthRef& cu_seqlens) {
  const BlockPlace first = place_of(first_block(cu_seqlens, b, rows, N), rows, B, N, cu_seqlens);
  return first.b == b && first.first == 0;
}

}  // namespace tessera::gpu
