// What a Hopper kernel is given: tensor maps for the tiles it copies, and the ladder's own parameters for the rest.
// Shared by host and device text.
#pragma once

#include "simt/params.hpp"

namespace tessera::sm90 {

// CUtensorMap: 128 opaque bytes that the hardware reads.
struct alignas(64) TensorMap {
  UInt64 words[16];
};

struct ForwardParams {
  TensorMap q, k, v, o;
  simt::ForwardParams call;
  Int32 Dv;      // the tensors' own: the kernel's D and Dv are multiples of 64
  float factor;  // of scores: their scale times log2(e)
  // Tiles of queries over all heads and sequences, in the order of their numbers: sections of `section` heads, which
  // share the L2 cache, and in a section the longest tiles first. Packed: a head's tiles are those of all sequences.
  Int32 tiles, tiles_per_head, section;
  UInt32* taken;  // of the tiles that blocks take as they come to them; null: block n has the tiles n, n + blocks, ...
};

// One side of the backward pass: rows X and Y, columns x and y (sm90/backward_config.hpp).
struct BackwardParams {
  TensorMap X, Y, x, y;
  simt::BackwardParams call;
  Int32 D, Dv;   // the tensors' own
  float factor;  // of scores: call.x.scale, which is corrected for what tensor cores lose, times log2(e)
  float scale;   // of dQ and dK: the caller's
};

}  // namespace tessera::sm90
