// SPDX-License-Identifier: Apache-2.0
// What the instruction-set specific kernels are given: plain structs, and the table of functions that each instruction
// set exports. Included by cpu/*.cpp and, before their target region opens, by cpu/isa/*.cpp.
#pragma once

#include "core/sequence.hpp"
#include "cpu/rows.hpp"
#include "cpu/tiles.hpp"
#include "math/mask.hpp"
#include "math/philox.hpp"
#include "math/score.hpp"
#include "math/types.hpp"

namespace tessera::cpu {

// One query head of one sequence, with everything that turns q.k into a score. Numbers in the exponent carry a factor
// log2(e), so that the kernels need exp2 only.
struct HeadJob {
  Int64 D, Dv, nq, nk;
  Rows q, qv;  // qv: null if not given
  KeyRows k, v;
  BandMask mask;
  RowMask rows;  // where queries stand; if given, what they see, and the mask is a band around it

  float scale;     // what dQ and dK are multiplied by at the end
  float dS_scale;  // what dS is multiplied by before that, so that sums may continue in another call
  ScoreOptions options;
  ScoreNumbers<float> score;
  PairNumbers bias, visible;  // head's part included: index with h = 0
  float sink;                 // times log2e; -inf: none

  UInt32 threshold;  // of dropout
  float keep_scale;
  PhiloxKey key;
  Int64 b0, h0, row0, col0;  // position of this head's element (0, 0) in the random stream
};

// What a row carries from call to call; head's part included: index with h = 0.
struct CarriedState {
  Rows o;
  RowNumbers m, l;

  explicit operator bool() const { return bool(m); }
};

struct ForwardJob {
  HeadJob head;
  Rows o;
  RowNumbers lse;                 // head's part included: index with h = 0
  CarriedState from{}, to{};      // null: rows start empty; O and LSE are finished
  const float* panels = nullptr;  // cpu/key_panels.hpp: K and V of every block of keys; null: the task packs its own
};

// All the queries of a few heads that share K and V, against a chunk of keys. Row h * nq + i leaves m, l and O,
// relative to m and not yet divided by l, at partials + row * row_stride.
struct DecodeJob {
  HeadJob heads[decode_rows];
  Int64 count;
  float* partials;
  Int64 row_stride;
};

// The backward pass of one head. delta and lse2 are arrays of the workspace, one number per query, padded to whole
// blocks. lse2 = LSE * log2(e); +inf for a row that sees nothing or does not exist, so that its P is 0.
struct BackwardJob {
  HeadJob head;
  Rows o, d_o;
  RowNumbers lse, d_lse;
  float* delta;
  float* lse2;
  float* dq_images;  // [groups][query_blocks][image_rows][block_q]; null: dQ is not asked for
  Int64 image_rows;  // D, and perhaps some that nobody reads
  Int64 groups;      // of keys
  Rows dq_from;      // the sums of dQ continue from these rows, in one group; null: from 0
  int* turns;        // [groups][query_blocks]: how many spans of the group have added to that part of its image
};

// One KV head's blocks of keys [block_begin, block_end), a span of a group: dK and dV are summed over the heads
// jobs[0 .. heads).
struct KeySpanJob {
  const BackwardJob* jobs;
  Int64 heads;
  Int64 group, first_block;  // of the group
  Int64 block_begin, block_end;
  Range queries;  // those that are summed over, whole blocks of them
  Rows dk, dv;    // null: not asked for
  Int64 key0;     // whose rows of dk and dv are the first
  bool accumulate;
};

// The spans of a group add to its image in order, block of queries by block of queries. Spins until `turn` spans have
// added. Their tasks were started before this one, so they make progress.
void await_turn(const int* turns, int turn);

// One element of dBias's leading dimensions and one tile of its last two: the sum of ds over `heads` jobs.
struct BiasGradientJob {
  const BackwardJob* const* jobs;
  Int64 heads;
  Range rows, keys;         // the part of every sequence that this job sums over
  bool sum_rows, sum_keys;  // bias is broadcast along queries, along keys
  PairNumbers dbias;        // at (0, 0) of the leading dimensions
  bool accumulate;
};

// What one instruction set exports.
struct Isa {
  const char* name;
  Int64 lanes;
  const char* unit;  // what computes products; null: multiply-adds
  // Of how many bf16 its operands are sums; 0: this problem's products are multiply-adds in f32.
  int (*pieces)(const Problem& problem);
  // The panel of one block of keys, K and V in the form that products read: its bytes (0: packing gains nothing), and
  // how it is packed. Panels never change the bits of a result.
  Int64 (*panel_bytes)(const Problem& problem);
  void (*pack_panel)(const HeadJob& head, Range keys, float* panel, float* scratch);
  // Bytes of scratch that one thread needs.
  Int64 (*scratch_bytes)(const Problem& problem);
  void (*forward)(const ForwardJob& job, Range query_blocks, float* scratch);  // forward_blocks of them at most
  // Several jobs interleaved, as many as scratch_bytes counted on: in [B,N,H,D] the rows of their heads are neighbours.
  void (*decode)(const DecodeJob* jobs, Int64 count, Range keys, float* scratch);
  // O and LSE of one head's queries, from partials [nq][chunks].
  void (*finish_decode)(const ForwardJob& job, const float* partials, Int64 chunks);
  // Rows of an image of dQ.
  Int64 (*image_rows)(Int64 D);
  void (*prepare)(const BackwardJob& job, Int64 query_block);
  void (*key_span)(const KeySpanJob& job, float* scratch);
  void (*finish_dq)(const BackwardJob& job, const Rows& dq, bool accumulate, Int64 query_block, float* scratch);
  void (*bias_gradient)(const BiasGradientJob& job, Int64 D, Int64 Dv, float* scratch);
};

extern const Isa sse4, avx2, avx512, avx512bf16, amx, neon;

}  // namespace tessera::cpu
