// SPDX-License-Identifier: Apache-2.0
// What a Hopper kernel is given: tensor maps for the tiles it copies, and what every family's kernels are given.
// Shared by host and device code.
#pragma once

#include "gpu/pages.hpp"
#include "gpu/state.hpp"
#include "sm90/config.hpp"
#include "sm90/work_order.hpp"

namespace tessera::sm90 {

// CUtensorMap: 128 opaque bytes that the hardware reads.
struct alignas(64) TensorMap {
  UInt64 words[16];
};

struct ForwardParams {
  TensorMap q, k, v, o;
  gpu::ForwardParams call;
  Int32 Dv;        // the tensors' own: the kernel's D and Dv are multiples of 64
  Int32 copies_O;  // O is aligned and its rows are as tensor copies want them
  float factor;    // of scores: score_scale times log2(e)
  // Tiles of queries over all heads and sequences, in the order of their numbers: sections of `section` heads, which
  // share the L2 cache, and in a section the longest tiles first. Packed: a head's tiles are those of all sequences.
  Int32 tiles, tiles_per_head, section;
  UInt32* taken;  // of the tiles that blocks take as they come to them; null: block n has the tiles n, n + blocks, ...
};

// The same for rows that begin or end with a state.
struct CarriedParams : ForwardParams {
  gpu::States states;
};

// Keys in pages. K and V have no map of whole tiles, but one for each size of a box: 1 << n rows, of those that occur.
// The batch stride of k and v is that of pages.
struct PagedParams : ForwardParams {
  TensorMap k_boxes[box_sizes], v_boxes[box_sizes];
  gpu::PageTables pages;
  gpu::LengthBounds most;
  Int32 least_queries;  // of a sequence; those with fewer are another launch's
};

// Sets the count to 0 before (sm90/kernel/restart.cuh).
struct RestartParams {
  UInt32* taken;
};

// One side of the backward pass: operands of rows and of columns (sm90/backward_config.hpp).
struct BackwardParams {
  TensorMap row_QK, row_VO, column_QK, column_VO;
  gpu::BackwardParams call;
  Int32 D, Dv;   // the tensors' own
  float factor;  // of scores, as above
};

// All gradients in one pass (sm90/one_pass_config.hpp). `sums` of dQ: tile t of head h is number h tiles_per_head + t.
// What it keeps in the workspace, for all of its kernels.
struct OnePassMemory {
  float* sums;
  float* numbers;  // of the queries of each tile
  UInt32* counts;  // of the blocks of keys that have added to each tile
  UInt32* taken;   // of the blocks of keys that somebody works on, or has
  void* works;     // what each block of keys has to do, one_pass_work_bytes each
  Int32 blocks;    // of keys
  Int32 tiles_per_head;
};

struct OnePassParams {
  TensorMap q, k, v, d_o;
  gpu::BackwardParams call;
  OnePassMemory memory;
  Int32 D, Dv;   // the tensors' own
  float factor;  // of scores, as above
};

// What comes before it, and after.
struct PrepareParams {
  gpu::BackwardParams call;
  OnePassMemory memory;
  WorkOrder order;
  Int32 Dv;
  void* zero;  // to be set to 0: `zeros` times 16 bytes
  Int64 zeros;
};

struct FinishParams {
  gpu::BackwardParams call;
  OnePassMemory memory;
  Int32 D;
};

}  // namespace tessera::sm90
