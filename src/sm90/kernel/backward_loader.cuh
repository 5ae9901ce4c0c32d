// SPDX-License-Identifier: Apache-2.0
// What a block of the Hopper backward kernels works on, its shared memory, and the warp that fills it: rows that stay,
// and tiles of columns that stream past, for keys those of every query head of the group. Device code.
#pragma once

#include "gpu/kernel/common.cuh"
#include "sm90/backward_config.hpp"
#include "sm90/params.hpp"
#include "sm90/ptx/tma.cuh"
#include "sm90/tile/ring.cuh"

namespace tessera::sm90 {

// One block's rows and the tiles of columns that they see, in shared memory: consumers have no registers to spare for
// it. Tokens are counted in 32 bits, as tensor copies count them.
template <BackwardConfig config>
struct BackwardWork {
  Int32 b, tensor_b;             // tensor_b: where tensor copies count sequences; all packed ones are one
  Int32 row_head, head, heads;   // of the rows; the first of the columns, and how many
  Int32 first, rows, row_begin;  // the block's first row, of so many in its sequence, which begins there
  Int32 columns, column_begin;   // of the sequence
  Int32 low, high;               // row r sees columns low + r to high + r
  Int32 begin, end;              // tiles of columns, at absolute positions
  Int32 own_begin[row_tiles(config)], own_end[row_tiles(config)];  // those that each 64 rows see
  bool others_follow;                                              // in memory, behind the sequence's columns
  Int64 shift;                                                     // of the diagonal, for ALiBi

  __device__ void find(const gpu::Question& x) {
    constexpr bool queries = owns_queries(config);
    gpu::QueryPlace place;
    rows = 0;
    if (!(queries ? gpu::query_place(x, rows_of(config), place) : gpu::key_place(x, rows_of(config), place))) return;
    const gpu::DeviceSequence& s = place.s;
    shift = s.shift;
    b = place.b, tensor_b = x.cu_seqlens_q.data ? 0 : place.b;
    row_head = queries ? place.h : place.kv, head = queries ? place.kv : place.h;
    heads = queries ? 1 : x.Hq / x.Hk;
    first = Int32(place.first);
    rows = Int32(queries ? s.nq : s.nk), row_begin = Int32(queries ? s.q_begin : s.k_begin);
    columns = Int32(queries ? s.nk : s.nq), column_begin = Int32(queries ? s.k_begin : s.q_begin);
    others_follow = column_begin + columns < (queries ? x.Nk : x.Nq);
    constexpr Int64 far = Int64(1) << 29;
    low = Int32(clamp(queries ? s.mask.low : -s.mask.high, -far, far));
    high = Int32(clamp(queries ? s.mask.high : -s.mask.low, -far, far));

    constexpr Int64 block = config.block_columns;
    const auto seen_by = [&](Int32 begin, Int32 end) {
      const Range range{begin, lesser(end, rows)};
      return queries ? visible_keys(s.mask, range) : visible_queries(s.mask, range);
    };
    const Range seen = seen_by(first, first + rows_of(config));
    begin = Int32(seen.begin / block);
    end = seen.empty() ? begin : Int32(ceil_div(seen.end, block));
#pragma unroll 1
    for (int g = 0; g < row_tiles(config); ++g) {
      const Range own = seen_by(first + 64 * g, first + 64 * g + 64);
      own_begin[g] = own_end[g] = begin;
      if (own.empty()) continue;
      own_begin[g] = Int32(lesser(own.begin / block, begin + most_passed(config)));
      own_end[g] = Int32(greater(ceil_div(own.end, block), end - most_passed(config)));
    }
  }

  __device__ bool none() const { return rows == 0; }
  // Row of the sequence that is row `row` of tile `tile` of 64 rows.
  __device__ Int32 row(int tile, int row) const { return first + 64 * tile + row; }
};
static_assert(sizeof(BackwardWork<BackwardConfig{}>) <= work_bytes);

template <BackwardConfig config>
struct BackwardShared {
  static constexpr BackwardLayout layout = layout_of(config);
  unsigned char* const base;

  __device__ UInt32 row_QK(int tile) const { return at(layout.row_QK + tile * layout.row_QK_bytes); }
  __device__ UInt32 row_VO(int tile) const { return at(layout.row_VO + tile * layout.row_VO_bytes); }
  using QKRing = Ring<config.stages, layout.column_QK, layout.column_QK_bytes, row_tiles(config)>;
  using VORing =
      Ring<config.vo_stages, layout.column_VO, layout.column_VO_bytes, row_tiles(config) + 2 * config.stages>;
  __device__ QKRing column_QK() const { return {base, barriers()}; }
  __device__ VORing column_VO() const { return {base, barriers()}; }
  // Of streamed queries.
  __device__ float* lse2(int stage) const { return numbers(layout.lse2, stage); }
  __device__ float* delta(int stage) const { return numbers(layout.delta, stage); }
  __device__ UInt32& blind(int stage) const { return reinterpret_cast<UInt32*>(base + layout.blind)[stage]; }

  __device__ BackwardWork<config>& work() const { return *reinterpret_cast<BackwardWork<config>*>(base + layout.work); }

  // P of paired warpgroups: four numbers of a thread, for the thread of the other one that has the same place in it.
  __device__ float4& P(int slot, int thread, int four) const {
    return reinterpret_cast<float4*>(base + layout.P + slot * layout.P_bytes)[128 * four + thread];
  }

  // full: what the place holds is here. empty: it is no longer read.
  __device__ Barrier& rows_full(int tile) const { return barrier(tile); }
  __device__ Barrier& P_full(int slot) const {
    return barrier(row_tiles(config) + 2 * (config.stages + config.vo_stages) + slot);
  }
  __device__ Barrier& P_empty(int slot) const { return P_full(slots_of_P(config) + slot); }

  __device__ void init_barriers() const {
    constexpr int warps = 4 * config.warpgroups;
    for (int g = 0; g < row_tiles(config); ++g) rows_full(g).init(1);
    // Queries bring numbers, which the loader's lanes copy.
    column_QK().init(owns_queries(config) ? 1 : 1 + 32, warps), column_VO().init(1, warps);
    for (int s = 0; s < slots_of_P(config); ++s) P_full(s).init(4), P_empty(s).init(4);  // warps
    publish_barriers();
  }

 private:
  __device__ UInt32 at(int offset) const { return shared_address(base) + offset; }
  __device__ float* numbers(int first, int stage) const {
    return reinterpret_cast<float*>(base + first) + stage * config.block_columns;
  }
  __device__ Barrier* barriers() const { return reinterpret_cast<Barrier*>(base + layout.barriers); }
  __device__ Barrier& barrier(int n) const { return barriers()[n]; }
};

// The loader: lane 0 of a warp starts the tensor copies. The others are there for the numbers of streamed queries only,
// which keep them together: a lane that was left behind might wait for what has come and gone.
template <BackwardConfig config>
struct BackwardLoader {
  static constexpr BackwardLayout layout = layout_of(config);
  static constexpr int columns = config.block_columns;
  const BackwardParams& p;
  const BackwardShared<config>& shared;
  const BackwardWork<config>& w;
  static constexpr int lanes = owns_queries(config) ? 1 : 32;
  const int lane = threadIdx.x % 32;

  __device__ void load_rows() const {
    for (int g = 0; g < row_tiles(config); ++g) {
      const TilePlace place{w.row_begin + w.row(g, 0), w.row_head, w.tensor_b};
      Barrier& full = shared.rows_full(g);
      full.expect(layout.row_QK_bytes + (needs_dP ? layout.row_VO_bytes : 0));
      load_tile<64, config.D / 64>(shared.row_QK(g), p.row_QK, full, place, pass_through_cache);
      if constexpr (needs_dP)
        load_tile<64, config.Dv / 64>(shared.row_VO(g), p.row_VO, full, place, pass_through_cache);
    }
  }

  template <int width>
  __device__ void load_columns(UInt32 to, const TensorMap& map, Barrier& full, Int32 head, Int32 tile) const {
    full.expect(columns * width * 2);
    load_tile<columns, width / 64>(to, map, full, {w.column_begin + tile * columns, head, w.tensor_b}, keep_in_cache);
  }

  // LSE and delta of a tile of queries, a few for each lane: read from memory before there is room for them. Those
  // beyond the sequence are as those that see nothing: they have P = 0.
  struct Numbers {
    float lse2[ceil_div(columns, 32)], delta[ceil_div(columns, 32)];
  };
  __device__ Numbers read_numbers(Int32 head, Int32 tile) const {
    const Int64 at = head * p.call.row_head + w.b * p.call.row_batch + w.column_begin;
    Numbers x;
#pragma unroll
    for (int n = 0; n < ceil_div(columns, 32); ++n) {
      const Int32 i = tile * columns + 32 * n + lane;
      const bool exists = 32 * n + lane < columns && i < w.columns;
      x.lse2[n] = exists ? p.call.lse2[at + i] : -minus_infinity<float>;
      x.delta[n] = exists ? p.call.delta[at + i] : 0;
    }
    return x;
  }
  __device__ void share_numbers(const Numbers& x, int stage) const {
    bool blind = false;
#pragma unroll
    for (int n = 0; n < ceil_div(columns, 32); ++n) {
      if (32 * n + lane >= columns) continue;
      shared.lse2(stage)[32 * n + lane] = x.lse2[n], shared.delta(stage)[32 * n + lane] = x.delta[n];
      blind |= x.lse2[n] == -minus_infinity<float>;
    }
    blind = __any_sync(0xffffffffu, blind);
    if (lane == 0) shared.blind(stage) = blind;
    shared.column_QK().full(stage).arrive();
  }

  __device__ void load() const {
    if (w.begin >= w.end) return;
    if (lane == 0) load_rows();
    RingPlace<config.stages> qk_place;
    RingPlace<config.vo_stages> vo_place;
    for (Int32 head = w.head; head < w.head + w.heads; ++head)
      for (Int32 tile = w.begin; tile < w.end; ++tile, qk_place.advance(), vo_place.advance()) {
        Numbers numbers;
        if constexpr (!owns_queries(config)) numbers = read_numbers(head, tile);
        shared.column_QK().wait_empty(qk_place);
        if (lane == 0)
          load_columns<config.D>(shared.column_QK().tile(qk_place.stage), p.column_QK,
                                 shared.column_QK().full(qk_place.stage), head, tile);
        if constexpr (!owns_queries(config)) share_numbers(numbers, qk_place.stage);
        shared.column_VO().wait_empty(vo_place);
        if (lane == 0)
          load_columns<config.Dv>(shared.column_VO().tile(vo_place.stage), p.column_VO,
                                  shared.column_VO().full(vo_place.stage), head, tile);
      }
  }

 private:
  static constexpr bool needs_dP = config.dQK != Element::none;
};

}  // namespace tessera::sm90
