// SPDX-License-Identifier: Apache-2.0
// What the compiler must know to specialise an `mma` kernel, and how its shared memory is laid out. A Config is the
// template argument of a kernel; the host writes it into the generated unit. Shared by host and device code.
// docs/gpu_kernels.md, "mma", says why it is laid out so.
#pragma once

#include "gpu/config.hpp"
#include "gpu/layout.hpp"

namespace tessera::mma {

using gpu::Chosen, gpu::Element;

inline constexpr int most_tile_dims = 256;  // D and Dv of the largest tile

struct Config {
  int D = 128, Dv = 128;                               // multiples of 16: what the tensors lack is 0 in shared memory
  Element element = Element::bf16, o = Element::bf16;  // of Q, K and V; of O: the same, or f32
  int warps = 4, row_tiles = 2;                        // a warp has 16 queries times row_tiles
  int block_keys = 64;                                 // keys of a tile
  int stages = 2;               // tiles of K, and of V: with two, the next ones are prefetched during a whole tile
  bool spreads_copies = false;  // with two: they are issued between the products of S, not before them
  bool q_registers = false;     // Q's fragments stay in registers, else they are loaded for every tile of keys
  int blocks_per_sm = 2;        // occupancy to compile for: __launch_bounds__ limits registers to it
  int copy_bytes = 16;  // of one copy to shared memory: what all rows are aligned to; 2: plain loads, no cp.async
  bool whole = true;    // D and Dv are the tensors' own: no column of a tile needs a check
  bool paged = false;   // keys are found by a page table
  Element k = Element::none, v = Element::none;  // of pages of 8 bits; none: Q's type
  bool scaled = false;                           // a head's keys, or values, have a scale
  // S is the sum of two products, of half the dims each: what tensor cores cut off a sum grows with its length.
  bool halves_S = false;
  bool turing = false;  // sm_75's instructions: products of 8 terms, no cp.async
  // Scores are computed one by one, with whichever options are on, and every tile has its maximum.
  bool general = false;
  gpu::ScoreConfig options{};

  constexpr bool operator==(const Config&) const = default;
};

constexpr int rows_of(const Config& c) { return 16 * c.row_tiles * c.warps; }
constexpr int threads_of(const Config& c) { return 32 * c.warps; }

// The description of a block's work, of where its keys are listed, and of a warp's share.
inline constexpr int work_bytes = 80, listing_bytes = 48, share_bytes = 16;

// Byte offsets in shared memory. Tiles begin at multiples of 1024, so that a row's number mod 8 is in its address.
struct Layout {
  int Q, K, V, work, listing, shares, bytes;
  int q_bytes, k_bytes, v_bytes;
};

constexpr int tile_bytes(int rows, int columns) { return rows * int(round_up(columns, gpu::panel_columns)) * 2; }

constexpr Layout layout_of(const Config& c) {
  Layout l{};
  l.q_bytes = tile_bytes(rows_of(c), c.D);
  l.k_bytes = tile_bytes(c.block_keys, c.D), l.v_bytes = tile_bytes(c.block_keys, c.Dv);
  l.Q = 0;
  l.K = l.Q + l.q_bytes;
  l.V = l.K + c.stages * l.k_bytes;
  l.work = l.V + c.stages * l.v_bytes;
  l.listing = l.work + work_bytes;
  l.shares = l.listing + (c.paged ? listing_bytes : 0);
  l.bytes = l.shares + c.warps * share_bytes;
  return l;
}

}  // namespace tessera::mma
