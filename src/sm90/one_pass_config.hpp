// What the compiler must know to specialise the Hopper kernel that makes all three gradients in one pass, and how its
// shared memory is laid out. Shared by host and device text.
#pragma once

#include "sm90/config.hpp"

namespace tessera::sm90 {

struct OnePassConfig {
  int D = 128, Dv = 128;            // 64 or 128: what the tensors lack is 0 in shared memory
  Element element = Element::bf16;  // of Q, K, V and dO
  Element dK = Element::bf16, dV = Element::bf16;
  int block_queries = 64;  // of a tile; a block of threads has 128 keys, 64 for each of two warpgroups
  int stages = 3;          // tiles of Q and dO in shared memory
  // A tile's sum of dQ is added to in the order of its blocks of keys; otherwise in whatever order they come, so that
  // bits change from run to run.
  bool ordered = true;

  constexpr bool operator==(const OnePassConfig&) const = default;
};

inline constexpr int one_pass_warpgroups = 2, one_pass_keys = 64 * one_pass_warpgroups;
inline constexpr int one_pass_threads = 128 * (1 + one_pass_warpgroups);
inline constexpr int dS_buffers = 2;  // one is written while the other is still multiplied with
inline constexpr int turns = 2;       // tiles whose turn to be added may have come already

inline constexpr int prepare_threads = 256, prepare_rows = 64;  // of a block of sm90/kernel/prepare.cuh

// The sum of dQ in the workspace: of each tile a part for each warpgroup, 64 rows by 64 columns in the order of the
// accumulators of 128 threads: four values of every thread, the next four, ... So additions are whole lines of memory.
inline constexpr int part_numbers = 64 * 64;
constexpr int parts_of(const OnePassConfig& c) { return c.block_queries * c.D / part_numbers; }
// Where a part begins in its tile.
constexpr int part_row(const OnePassConfig& c, int part) { return 64 * part % c.block_queries; }
constexpr int part_column(const OnePassConfig& c, int part) { return 64 * part / c.block_queries * 64; }

// Byte offsets. Tiles begin at multiples of 1024, as the 128-byte swizzle demands.
struct OnePassLayout {
  int K, V, Q, dO, dS, lse2, delta, blind, first, work, barriers, bytes;  // K, V: tiles of 64 keys, one per warpgroup
  int K_bytes, V_bytes, Q_bytes, dO_bytes, dS_bytes;
};

constexpr OnePassLayout layout_of(const OnePassConfig& c) {
  OnePassLayout l{};
  l.K_bytes = 64 * c.D * 2, l.V_bytes = 64 * c.Dv * 2;
  l.Q_bytes = c.block_queries * c.D * 2, l.dO_bytes = c.block_queries * c.Dv * 2;
  l.dS_bytes = c.block_queries * one_pass_keys * 2;
  l.K = 0;
  l.V = l.K + one_pass_warpgroups * l.K_bytes;
  l.Q = l.V + one_pass_warpgroups * l.V_bytes;
  l.dO = l.Q + c.stages * l.Q_bytes;
  l.dS = l.dO + c.stages * l.dO_bytes;
  // Of queries, a row of numbers per stage, and whether one of them is to be left out.
  l.lse2 = l.dS + dS_buffers * l.dS_bytes;
  l.delta = l.lse2 + c.stages * c.block_queries * 4;
  l.blind = l.delta + c.stages * c.block_queries * 4;
  l.first = l.blind + c.stages * 8;
  l.work = l.first + turns * 8;
  l.barriers = l.work + work_bytes;
  l.bytes = l.barriers + 8 * (1 + 2 * c.stages + 3 * turns);
  return l;
}

}  // namespace tessera::sm90
