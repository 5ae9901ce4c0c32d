// SPDX-License-Identifier: Apache-2.0
// What the compiler must know to specialise the `mma` kernel that makes all three gradients in one pass, and how its
// shared memory is laid out. Shared by host and device code. docs/gpu_kernels.md, "mma".
#pragma once

#include "mma/config.hpp"

namespace tessera::mma {

// How the sums of dQ lie in the workspace. A tile of queries is shared out among all warps of a block, each of which
// has its part in one piece, in the order of its accumulators: four values of every lane, the next four, ...
struct QuerySums {
  int D = 64, queries = 32, warps = 4;

  // A warp has 32 rows, so that each fragment of K is used twice, and so many columns.
  static constexpr int row_tiles = 2;
  constexpr int row_parts() const { return queries / (16 * row_tiles); }
  constexpr int columns() const { return D * row_parts() / warps; }
  constexpr int first_row(int warp) const { return warp % row_parts() * 16 * row_tiles; }
  constexpr int first_column(int warp) const { return warp / row_parts() * columns(); }
  constexpr int part_numbers() const { return 16 * row_tiles * columns(); }
  constexpr int tile_numbers() const { return queries * D; }

  constexpr bool operator==(const QuerySums&) const = default;
};

struct OnePassConfig {
  int D = 64, Dv = 64;              // D: 64, 128 or 256, Dv: a multiple of 16
  Element element = Element::bf16;  // of Q, K, V and dO
  Element dK = Element::bf16, dV = Element::bf16;
  int warps = 4, row_tiles = 2;  // that share out the keys: 16 times row_tiles each
  // As many warps more, each with the keys of another one: the first computes S and P and sums dV, the second computes
  // dP and dS and sums dK. P goes from one to the other through shared memory, in f32.
  bool paired = false;
  int block_queries = 32;          // of a tile
  int q_stages = 2, o_stages = 2;  // tiles of Q and of dO; with one, the next is copied at the end of a tile
  int blocks_per_sm = 2;
  int copy_bytes = 16;
  bool whole = true, halves_S = false, turing = false;  // as in Config
  // A tile's sum of dQ is added to in the order of its blocks of keys; otherwise in whatever order they come, so that
  // bits change from run to run.
  bool ordered = true;
  // If so, one warp passes the whole block's turns on, at so many neighbouring tiles at once.
  int turn_tiles = 1;

  constexpr bool operator==(const OnePassConfig&) const = default;
};

constexpr int warps_of(const OnePassConfig& c) { return c.paired ? 2 * c.warps : c.warps; }
constexpr int threads_of(const OnePassConfig& c) { return 32 * warps_of(c); }
constexpr int keys_of(const OnePassConfig& c) { return 16 * c.row_tiles * c.warps; }
constexpr int most_turn_tiles = 2;
constexpr QuerySums sums_of(const OnePassConfig& c) {
  return {.D = c.D, .queries = c.block_queries, .warps = warps_of(c)};
}

inline constexpr int one_pass_work_bytes = 96, source_bytes = 24;

// Byte offsets in shared memory.
struct OnePassLayout {
  int K, V, Q, dO, dS, P, numbers, sources, work, bytes;  // sources: what each thread copies next
  int Q_bytes, dO_bytes, numbers_bytes;                   // of a stage; numbers: LSE of every query, then delta
};

constexpr OnePassLayout layout_of(const OnePassConfig& c) {
  OnePassLayout l{};
  const int scores = keys_of(c) * c.block_queries;
  l.Q_bytes = tile_bytes(c.block_queries, c.D), l.dO_bytes = tile_bytes(c.block_queries, c.Dv);
  l.numbers_bytes = 8 * c.block_queries;
  l.K = 0;
  l.V = l.K + tile_bytes(keys_of(c), c.D);
  l.Q = l.V + tile_bytes(keys_of(c), c.Dv);
  l.dO = l.Q + c.q_stages * l.Q_bytes;
  l.dS = l.dO + c.o_stages * l.dO_bytes;
  l.P = l.dS + 2 * scores;
  l.numbers = l.P + (c.paired ? 4 * scores : 0);
  l.sources = l.numbers + c.q_stages * l.numbers_bytes;
  l.work = l.sources + threads_of(c) * source_bytes;
  l.bytes = l.work + one_pass_work_bytes;
  return l;
}

// The kernels before and after: `prepare` has a few lanes for a row, `finish` a block for a tile of sums.
inline constexpr int prepare_threads = 256, prepare_queries = 64;  // of a block

struct PrepareConfig {
  Element o = Element::bf16, d_o = Element::bf16;
  int lanes = 8;        // that share a row: a power of two, of 8 columns each
  bool aligned = true;  // rows of O and dO begin at multiples of 16 bytes

  constexpr bool operator==(const PrepareConfig&) const = default;
};

struct FinishConfig {
  int D = 64, queries = 32, warps = 4;  // as in QuerySums
  bool ordered = true;                  // as in OnePassConfig; else sums begin with 0
  Element dQ = Element::bf16;

  constexpr QuerySums sums() const { return {D, queries, warps}; }
  constexpr bool operator==(const FinishConfig&) const = default;
};

}  // namespace tessera::mma
