// SPDX-License-Identifier: Apache-2.0
// What the `mma` kernels are given besides what every GPU kernel is given. Shared by host and device code.
// Included by src/mma and the tests; docs/gpu_kernels.md, "mma".
#pragma once

#include "gpu/pages.hpp"

namespace tessera::mma {

struct ForwardParams {
  gpu::ForwardParams call;
  Int32 D, Dv;           // of the tensors
  float factor;          // of products q.k: score_scale log2(e)
  Int32 tiles_per_head;  // tiles of queries of a head (packed: of all sequences)
  // Heads that are worked on at the same time: the cache holds their K and V. Divides the number of heads.
  Int32 section;
  // Where all sequences are of one length: that, and the band of the first query. Blocks then need not look.
  bool even;
  Int32 queries, keys;
  Int64 shift;
  Int64 low, high;
};

// Keys in pages: the batch stride of k and v is that of pages.
struct PagedParams : ForwardParams {
  gpu::PageTables pages;
  gpu::ScaleRef k_scale, v_scale;  // one for all keys of a head, or of a sequence's
  gpu::LengthBounds most;
  Int32 least_queries;  // of a sequence; those with fewer are another launch's
};

struct BackwardParams {
  gpu::BackwardParams call;
  Int32 D, Dv;                    // of the tensors
  float factor;                   // of products q.k
  Int32 tiles_per_head, section;  // of the block's own rows; see ForwardParams
};

// All gradients in one pass: what its kernels keep in the workspace. Tile t of the queries of head h is number
// h tiles_per_head + t.
struct OnePassMemory {
  float* sums;     // of dQ; mma/one_pass_config.hpp, QuerySums
  UInt32* counts;  // of the blocks of keys that have added to each tile, if in order
  UInt32* taken;   // of the blocks of keys that somebody works on, or has
  Int32 tiles_per_head;
};

// How a thread gets on in a tensor of which tiles are copied one after another: numbers from its chunk to that of the
// next rows, and from a tile back to the one before.
struct TileStride {
  Int64 advance, back;
};

struct OnePassParams {
  gpu::BackwardParams call;
  OnePassMemory memory;
  TileStride Q, dO;
  Int32 D, Dv;                     // of the tensors
  float factor;                    // of products q.k
  Int32 blocks_per_head, section;  // of keys; see ForwardParams
};

struct PrepareParams {
  gpu::BackwardParams call;
  Int32 Dv;
  void* zero;  // to be set to 0: `zeros` times 16 bytes
  Int64 zeros;
};

struct FinishParams {
  gpu::BackwardParams call;
  OnePassMemory memory;
  Int32 D;
};

}  // namespace tessera::mma
