// SPDX-License-Identifier: Apache-2.0
// What the compiler must know to specialise a `decode` kernel, and how its shared memory is laid out. A Config is the
// template argument of a kernel; the host writes it into the generated unit. Shared by host and device code.
// docs/gpu_kernels.md, "decode", says why it is laid out so.
#pragma once

#include "gpu/config.hpp"
#include "gpu/layout.hpp"

namespace tessera::decode {

using gpu::Element;

inline constexpr int warps = 4, threads = 32 * warps;
inline constexpr int most_rows = 64;        // queries times heads of a KV head
inline constexpr int most_tile_dims = 256;  // D and Dv of the largest tile

struct Config {
  int D = 128, Dv = 128;                               // multiples of 64: what the tensors lack is 0 in shared memory
  Element element = Element::bf16, o = Element::bf16;  // of Q, K and V; of O: the same, or f32
  int rows = 8;           // queries times heads: the columns of the products; 8, 16, 32 or 64
  int tile_keys = 64;     // 64 or 32; decides about bits, and so depends on head dims and shared memory alone
  int stages = 3;         // tiles of K and V: all but one are on their way while one is worked on
  int levels = 2;         // of the stack of states that lie in shared memory; those above lie in the workspace
  int blocks_per_sm = 2;  // occupancy to compile for
  bool whole = true;      // D and Dv are the tensors' own: no column of a tile needs a check
  bool paged = false;     // keys are found by a page table
  // S is the sum of two products, of half the dims each: what tensor cores cut off a sum grows with its length.
  bool halves_S = false;
  gpu::ScoreConfig options{};

  constexpr bool operator==(const Config&) const = default;
};

struct ScheduleConfig {
  int threads = 256;
  constexpr bool operator==(const ScheduleConfig&) const = default;
};
inline constexpr int schedule_bytes = 1024;  // of shared memory

// A state in memory, wherever: O in the order of accumulators, a float4 of every thread side by side, then m and l of
// each row.
constexpr int state_floats(int rows, int Dv) { return rows * Dv + 2 * rows; }

// Byte offsets in shared memory. Tiles begin at multiples of 1024, so that a row's number mod 8 is in its address.
struct Layout {
  int K, V, k_bytes, v_bytes;  // of stage 0, and from stage to stage
  int Q, P;
  int places;                 // of the rows of each stage's tile in memory: K's, then V's
  int maxima, sums, columns;  // of rows: by warp; what is known of each
  int work, stack, bytes;
  int out, weights;  // at the end of a work item, where K and V were
};

inline constexpr int work_bytes = 160, column_bytes = 32;
// Rows of f32 O on their way to memory are so far apart: a warp's eight dims of four rows are in different banks.
constexpr int out_pitch(int Dv) { return Dv + 4; }

constexpr Layout layout_of(const Config& c) {
  Layout l{};
  l.k_bytes = c.tile_keys * c.D * 2, l.v_bytes = c.tile_keys * c.Dv * 2;
  l.K = 0;
  l.V = l.K + c.stages * l.k_bytes;
  const int ring = l.V + c.stages * l.v_bytes;
  l.out = 0, l.weights = 0;
  const int at_the_end = 4 * c.rows * out_pitch(c.Dv);
  l.Q = ring > at_the_end ? ring : int(round_up(at_the_end, 1024));
  l.P = l.Q + c.rows * c.D * 2;
  l.places = l.P + c.tile_keys * c.rows * 2;
  l.maxima = l.places + c.stages * 2 * c.tile_keys * int(sizeof(Int64));
  l.sums = l.maxima + warps * c.rows * 4;
  l.columns = l.sums + warps * c.rows * 4;
  l.work = l.columns + c.rows * column_bytes;
  l.stack = l.work + work_bytes;
  l.bytes = l.stack + c.levels * state_floats(c.rows, c.Dv) * 4;
  return l;
}

}  // namespace tessera::decode
