// SPDX-License-Identifier: Apache-2.0
// What the compiler must know to specialise a `decode` kernel, and how its shared memory is laid out. A Config is the
// template argument of a kernel; the host writes it into the generated unit. Shared by host and device code.
// docs/gpu_kernels.md, "decode", says why it is laid out so.
#pragma once

#include "gpu/config.hpp"
#include "gpu/layout.hpp"
#include "gpu/pages.hpp"

namespace tessera::decode {

using gpu::Element;

inline constexpr int sum_warps = 4;                           // those that sum l
inline constexpr int most_rows = gpu::few_rows;               // queries times heads of a KV head
inline constexpr int most_dims = 576, most_value_dims = 512;  // D and Dv of the largest tile

constexpr bool eight_bits(Element type) { return type == Element::e4m3 || type == Element::i8; }

struct Config {
  int D = 128, Dv = 128;            // multiples of 64: what the tensors lack is 0 in shared memory
  Element element = Element::bf16;  // of the products, of Q and P in shared memory: f16 beside 8 bits, else Q's
  Element q = Element::bf16, k = Element::bf16, v = Element::bf16, o = Element::bf16;  // of the tensors
  int rows = 8;           // queries times heads: the columns of the products; 8, 16, 32 or 64
  int tile_keys = 64;     // that are worked on at once: 128, 64 or 32
  int parts = 1;          // of a tile, each with a maximum of its own: tile_keys / parts, 64 or 32, decides about
                          // bits, and so depends on head dims and shared memory alone
  int stages = 3;         // tiles of K and V: all but one are on their way while one is worked on
  int levels = 2;         // of the stack of states that lie in shared memory; those above lie in the workspace
  int blocks_per_sm = 2;  // occupancy to compile for
  int warps = 4;          // 4, or 8: each multiplies 16 dims of every 64, or of every 128, of O
  bool direct = false;    // a block's work items follow from its number: there is no queue to wait for
  int cluster = 0;        // direct: a cluster of so many blocks has all nodes of a group, one each; 0: any block any
  bool whole = true;      // D and Dv are the tensors' own: no column of a tile needs a check
  bool paged = false;     // keys are found by a page table
  bool scaled = false;    // keys, or values, have scales
  int k_groups = 1;       // scales of a key: one, or one for each 128 dims
  int v_groups = 1;       // of a value
  bool qv = false;        // scores are products with values, too
  bool draft = false;     // rows have places of their own, or bits of a tree
  // S is the sum of two products, of half the dims each: what tensor cores cut off a sum grows with its length.
  bool halves_S = false;
  gpu::ScoreConfig options{};

  constexpr int threads() const { return 32 * warps; }
  constexpr int key_warps() const { return tile_keys / 16; }  // those that multiply S: 16 keys of a tile each
  constexpr int dims_at_once() const { return 16 * warps; }   // of O, by all warps
  constexpr bool operator==(const Config&) const = default;
};

struct ScheduleConfig {
  int threads = 256;
  constexpr bool operator==(const ScheduleConfig&) const = default;
};
inline constexpr int schedule_bytes = 16384;  // of shared memory

// A state in memory, wherever: O in the order of accumulators, a float4 of every thread side by side, then m and l of
// each row.
constexpr int state_floats(int rows, int Dv) { return rows * Dv + 2 * rows; }

// Columns of a tile in shared memory, in units of 16 bits: rows of a panel are 128 bytes, whatever their numbers are.
constexpr int units_of(int dims, Element type) {
  return eight_bits(type) ? int(round_up(dims / 2, gpu::panel_columns)) : dims;
}

// Dims that have a scale of their own, where a key or a value has several.
inline constexpr int group_dims = 128;

// Byte offsets in shared memory. Tiles begin at multiples of 1024, so that a row's number mod 8 is in its address.
struct Layout {
  int K, V, k_bytes, v_bytes;  // of stage 0, and from stage to stage
  int Q, Qv, P;
  int later_sums;             // of exponentials of the second part of a tile, by lane
  int places, scale_places;   // of the rows of each stage's tile in memory: K's, then V's; of their scales
  int scales;                 // of each stage's tile: K's, then V's; of each, those of the first dims come first
  int maxima, sums, columns;  // of rows: by warp, of scores and of what V is multiplied by; what is known of each
  int work, stack, bytes;
  int out, weights;  // at the end of a work item, where K and V were
  int sibling;       // the same, for a cluster's other blocks: the state of a node
};

inline constexpr int work_bytes = 192, column_bytes = 48;
// Rows of f32 O on their way to memory are so far apart: a warp's eight dims of four rows are in different banks.
constexpr int out_pitch(int Dv) { return Dv + 4; }

constexpr Layout layout_of(const Config& c) {
  Layout l{};
  l.k_bytes = c.tile_keys * units_of(c.D, c.k) * 2, l.v_bytes = c.tile_keys * units_of(c.Dv, c.v) * 2;
  l.K = 0;
  l.V = l.K + c.stages * l.k_bytes;
  const int ring = l.V + c.stages * l.v_bytes;
  l.out = 0, l.weights = 0;
  l.sibling = 4 * c.rows * out_pitch(c.Dv);  // behind both
  const int at_the_end = l.sibling + (c.cluster > 1 ? 4 * state_floats(c.rows, c.Dv) : 0);
  l.Q = ring > at_the_end ? ring : int(round_up(at_the_end, 1024));
  l.Qv = l.Q + c.rows * c.D * 2;
  l.P = l.Qv + (c.qv ? c.rows * c.Dv * 2 : 0);
  l.later_sums = l.P + c.v_groups * c.tile_keys * c.rows * 2;
  l.places = l.later_sums + (c.parts - 1) * sum_warps * 32 * (c.rows / 4) * 4;
  const int tile_rows = c.stages * 2 * c.tile_keys, scaled_rows = c.scaled ? tile_rows : 0;
  l.scale_places = l.places + tile_rows * int(sizeof(UInt64));
  l.scales = l.scale_places + scaled_rows * int(sizeof(Int64));
  l.maxima = l.scales + scaled_rows * 2 * (c.k_groups + c.v_groups);
  l.sums = l.maxima + (c.scaled ? 1 + c.v_groups : 1) * c.key_warps() * c.rows * 4;
  l.columns = l.sums + sum_warps * c.rows * 4;
  l.work = l.columns + c.rows * column_bytes;
  l.stack = l.work + work_bytes;
  l.bytes = l.stack + c.levels * state_floats(c.rows, c.Dv) * 4;
  return l;
}

}  // namespace tessera::decode
