// SPDX-License-Identifier: Apache-2.0
// What the compiler must know to specialise the Hopper kernel that makes all three gradients in one pass, and how its
// shared memory is laid out. Shared by host and device code.
#pragma once

#include "sm90/config.hpp"

namespace tessera::sm90 {

inline constexpr int one_pass_tile_dims = 128;  // D and Dv of its largest tile

struct OnePassConfig {
  int D = 128, Dv = 128;            // 64 or 128: what the tensors lack is 0 in shared memory
  Element element = Element::bf16;  // of Q, K, V and dO
  Element dK = Element::bf16, dV = Element::bf16;
  int block_queries = 64;  // of a tile; a block of threads has 128 keys, 64 for each of two warpgroups
  // Tiles of Q, dO and dS in shared memory: of dS one is written while the one before is still multiplied with. Two
  // are enough for the warpgroups to be half a tile apart.
  int stages = 2;
  // A tile's sum of dQ is added to in the order of its blocks of keys; otherwise in whatever order they come, so that
  // bits change from run to run.
  bool ordered = true;

  constexpr bool operator==(const OnePassConfig&) const = default;
};

inline constexpr int one_pass_warpgroups = 2, one_pass_keys = 64 * one_pass_warpgroups;
inline constexpr int one_pass_threads = 128 * (1 + one_pass_warpgroups);
// Blocks in shared memory, of K: in work, and to come. V is done with earlier, and has one.
inline constexpr int key_slots = 2;

inline constexpr int prepare_threads = 256;  // of a block of sm90/kernel/prepare.cuh, which has a tile's queries

// What is known beforehand of a tile's queries, one after another in memory: LSE in units of log2(e), delta, and
// whether one of them is to be left out; to 16 bytes.
constexpr int delta_at(const OnePassConfig& c) { return c.block_queries; }
constexpr int blind_at(const OnePassConfig& c) { return 2 * c.block_queries; }
constexpr int numbers_of(const OnePassConfig& c) { return 2 * c.block_queries + 4; }

// The sum of dQ in the workspace: of each tile a part for each warpgroup, 64 rows by 64 columns in the order of the
// accumulators of 128 threads: four values of every thread, the next four, ... On their way the parts are in shared
// memory in the same order, from where a copy adds them: stores from registers would wait for the cache that adds.
inline constexpr int part_numbers = 64 * 64, part_bytes = part_numbers * 4;
constexpr int parts_of(const OnePassConfig& c) { return c.block_queries * c.D / part_numbers; }
// Where a part begins in its tile.
constexpr int part_row(const OnePassConfig& c, int part) { return 64 * part % c.block_queries; }
constexpr int part_column(const OnePassConfig& c, int part) { return 64 * part / c.block_queries * 64; }

inline constexpr int one_pass_work_bytes = 64;  // a description of a block's work
inline constexpr int one_pass_work_barriers = 3 * key_slots + 4;
inline constexpr int dQ_adders = 2;  // threads that add dQ to memory, a tile each

// Byte offsets. Tiles begin at multiples of 1024, as the 128-byte swizzle demands.
struct OnePassLayout {
  int K, V, Q, dO, dS, dQ, numbers, work, barriers, bytes;  // K, V: tiles of 64 keys, for each warpgroup
  int K_bytes, V_bytes, Q_bytes, dO_bytes, dS_bytes;
};

constexpr OnePassLayout layout_of(const OnePassConfig& c) {
  OnePassLayout l{};
  l.K_bytes = 64 * c.D * 2, l.V_bytes = 64 * c.Dv * 2;
  l.Q_bytes = c.block_queries * c.D * 2, l.dO_bytes = c.block_queries * c.Dv * 2;
  l.dS_bytes = c.block_queries * one_pass_keys * 2;
  l.K = 0;
  l.V = l.K + key_slots * one_pass_warpgroups * l.K_bytes;
  l.Q = l.V + one_pass_warpgroups * l.V_bytes;
  l.dO = l.Q + c.stages * l.Q_bytes;
  l.dS = l.dO + c.stages * l.dO_bytes;
  l.dQ = l.dS + c.stages * l.dS_bytes;
  l.numbers = l.dQ + one_pass_warpgroups * part_bytes;
  l.work = l.numbers + c.stages * numbers_of(c) * 4;
  l.barriers = l.work + key_slots * one_pass_work_bytes;
  l.bytes = l.barriers + 8 * (one_pass_work_barriers + 6 * c.stages + dQ_adders + 1);
  return l;
}

}  // namespace tessera::sm90
