// SPDX-License-Identifier: Apache-2.0
// The products of the column engine: S^T = K Q^T and O^T += V^T P^T by mma.sync, with K and V as left operands straight
// from shared memory, of 16 bits or of 8. Device code; decode/layout.hpp says which element a lane gets.
#pragma once

#include "decode/kernel/rows.cuh"
#include "decode/kernel/state.cuh"
#include "gpu/kernel/eight_bits.cuh"
#include "gpu/kernel/lanes.cuh"
#include "gpu/kernel/matrix.cuh"

namespace tessera::decode {

template <Config config>
struct Products : Rows<config> {
  using Base = Rows<config>;
  using Base::layout, Base::R, Base::T;
  static constexpr int columns = State<config>::columns, values = State<config>::values;
  using Scores = float[columns][4];  // S^T: keys are rows. Value e of four: key e / 2, column e % 2

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  using Base::Base;
  template <class Thing>
  __device__ Thing* shared(int offset) const {
    return Base::template shared<Thing>(offset);
  }

  // --- step 1: S^T = K Q^T of a warp's 16 keys

  // 16 keys by 32 dims of a tile: the left operands of two products.
  template <Element type>
  __device__ static void load_keys(UInt32 (&a)[2][4], UInt32 k_lane, int k) {
    if constexpr (eight_bits(type)) {
      UInt32 bytes[4];
      gpu::load_matrices<false>(bytes, gpu::turned(k_lane, gpu::column_turn(k)) + gpu::panel_step(T, k));
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          a[half][n] = gpu::widened<type, false>(bytes[2 * half + n]);
          a[half][2 + n] = gpu::widened<type, true>(bytes[2 * half + n]);
        }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        gpu::load_matrices<false>(
            a[half], gpu::turned(k_lane, gpu::column_turn(2 * k + half)) + gpu::panel_step(T, 2 * k + half));
    }
  }
  template <Element type, int first, int end>
  __device__ void multiply_dims(Scores& S, UInt32 k_lane, UInt32 q_lane) const {
#pragma unroll
    for (int c = 0; c < columns; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) S[c][e] = 0;
#pragma unroll
    for (int k = first; k < end; ++k) {  // 32 dims
      UInt32 a[2][4];
      load_keys<type>(a, k_lane, k);
#pragma unroll
      for (int c = 0; c < columns; ++c) {
        UInt32 b[4];
        gpu::load_matrices<false>(b, gpu::turned(q_lane, q_turn(k)) + q_step(R, k) + c * 8 * gpu::panel_row_bytes);
        gpu::multiply<config.element, false>(S[c], a[0], b[0], b[1]);
        gpu::multiply<config.element, false>(S[c], a[1], b[2], b[3]);
      }
    }
  }
  __device__ UInt32 key_lane(int tile) const {
    return this->address(tile) + warp * gpu::bytes_of_16_rows + gpu::lane_byte(gpu::a_row(lane), gpu::a_column(lane));
  }
  __device__ UInt32 query_lane(int query) const {
    return this->address(query) + gpu::tile_byte(R, q_row(lane), q_dim(lane));
  }
  // The keys of a tile at `tile` times the rows of Q at `query`, of so many dims.
  template <Element type, int dims>
  __device__ void multiply_tile(Scores& S, int tile, int query) const {
    constexpr int steps = dims / 32;
    const UInt32 k_lane = key_lane(tile), q_lane = query_lane(query);
    if constexpr (config.halves_S && steps > 1) {
      Scores rest;
      multiply_dims<type, 0, steps / 2>(S, k_lane, q_lane);
      multiply_dims<type, steps / 2, steps>(rest, k_lane, q_lane);
#pragma unroll
      for (int c = 0; c < columns; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) S[c][e] += rest[c][e];
    } else {
      multiply_dims<type, 0, steps>(S, k_lane, q_lane);
    }
  }
  // The scale of a group of a key's dims (side 0) or of a value's: of the first of the lane's two, or of the second.
  __device__ float scale_of(int stage, int side, int group, int half) const {
    return shared<const float>(layout.scales)[Base::scales_at(stage, side, group) + 16 * warp + lane / 4 + 8 * half];
  }
  __device__ void scale_keys(Scores& S, int stage, int side, int group) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float scale = scale_of(stage, side, group, half);
#pragma unroll
      for (int c = 0; c < columns; ++c)
#pragma unroll
        for (int e = 0; e < 2; ++e) S[c][2 * half + e] *= scale;
    }
  }
  // Products of 128 dims after another: each has its own scales.
  template <int side, int group = 0>
  __device__ void add_groups(Scores& S, int stage, UInt32 k_lane, UInt32 q_lane) const {
    constexpr int dims = side ? config.Dv : config.D, steps = dims / 32, of_group = group_dims / 32;
    constexpr int first = group * of_group, end = first + of_group < steps ? first + of_group : steps;
    Scores part;
    multiply_dims<side ? config.v : config.k, first, end>(part, k_lane, q_lane);
    scale_keys(part, stage, side, group);
#pragma unroll
    for (int c = 0; c < columns; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) S[c][e] = group == 0 ? part[c][e] : S[c][e] + part[c][e];
    if constexpr (end < steps) add_groups<side, group + 1>(S, stage, k_lane, q_lane);
  }
  // The products of keys (side 0), or of values, with the rows of Q, or of Qv.
  template <int side>
  __device__ void multiply_side(Scores& S, int stage) const {
    const int tile = side ? layout.V + stage * layout.v_bytes : layout.K + stage * layout.k_bytes;
    const int query = side ? layout.Qv : layout.Q;
    if constexpr ((side ? config.v_groups : config.k_groups) > 1) {
      add_groups<side>(S, stage, key_lane(tile), query_lane(query));
    } else {
      multiply_tile<side ? config.v : config.k, side ? config.Dv : config.D>(S, tile, query);
      if constexpr (config.scaled) scale_keys(S, stage, side, 0);
    }
  }
  __device__ void multiply_KQ(Scores& S, int stage) const {
    multiply_side<0>(S, stage);
    if constexpr (config.qv) {
      Scores more;
      multiply_side<1>(more, stage);
#pragma unroll
      for (int c = 0; c < columns; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) S[c][e] += more[c][e];
    }
  }

  // --- step 3: O^T += V^T P^T, of a warp's 16 dims of a value tile

  // P of 32 keys, as it is for one group of the values' dims.
  __device__ void load_P(UInt32 (&b)[columns][4], int j, int group) const {
    const UInt32 p_lane = this->address(layout.P) + p_byte(R, p_key(lane), 0);
#pragma unroll
    for (int c = 0; c < columns; ++c)
      gpu::load_matrices<true>(b[c], gpu::turned(p_lane, p_turn(c)) + (group * T + j * 32) * R * 2);
  }
  // `begin_part` is called before the products of a part of the tile, but for the first.
  static constexpr int part_keys = T / config.parts;
  template <class BeginPart>
  __device__ void multiply_VP(State<config>& state, int stage, BeginPart begin_part) const {
    if constexpr (eight_bits(config.v)) return multiply_VP_of_bytes(state, stage, begin_part);
    const UInt32 v_lane = this->address(layout.V + stage * layout.v_bytes) +
                          gpu::turned(gpu::lane_byte(v_key(lane), v_dim(lane)), gpu::column_turn(warp)) +
                          gpu::panel_step(T, warp);
    constexpr int value_step = gpu::panel_step(T, config.warps);
#pragma unroll
    for (int n = 0; n < config.v_groups * (T / 32); ++n) {  // 32 keys
      const int j = n / config.v_groups, g = n % config.v_groups;
      if (n > 0 && n % (config.v_groups * part_keys / 32) == 0) begin_part();
      UInt32 b[columns][4];
      load_P(b, j, g);
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int v = 0; v < values; ++v) {
          if (State<config>::group_of(v) != g) continue;
          UInt32 a[4];
          gpu::load_matrices<true>(a, v_lane + v * value_step + (2 * j + half) * gpu::bytes_of_16_rows);
#pragma unroll
          for (int c = 0; c < columns; ++c)
            gpu::multiply<config.element, false>(state.O[v][c], a, b[c][2 * half], b[c][2 * half + 1]);
        }
    }
  }

  // The same with values of 8 bits.
  template <class BeginPart>
  __device__ void multiply_VP_of_bytes(State<config>& state, int stage, BeginPart begin_part) const {
    constexpr int tiles = config.dims_at_once() / 64;  // in a value tile
    const UInt32 v_lane =
        this->address(layout.V + stage * layout.v_bytes) + gpu::tile_byte(T, v8_key(lane), warp * gpu::chunk_columns);
#pragma unroll
    for (int n = 0; n < config.v_groups * (T / 32); ++n) {  // 32 keys
      const int j = n / config.v_groups, g = n % config.v_groups;
      if (n > 0 && n % (config.v_groups * part_keys / 32) == 0) begin_part();
      UInt32 b[columns][4];
      load_P(b, j, g);
#pragma unroll
      for (int v = 0; v < values; ++v) {
        if (State<config>::group_of(v) != g) continue;
        UInt32 bytes[4];
        gpu::load_matrices<true>(
            bytes, gpu::turned(v_lane, v8_turn(v * tiles)) + v8_step(T, v * tiles) + 2 * j * gpu::bytes_of_16_rows);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          UInt32 a[4];
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            const UInt32 by_dim = gpu::bytes_of(bytes[2 * half + n], 0, v8_bytes);
            a[2 * n] = gpu::widened<config.v, false>(by_dim), a[2 * n + 1] = gpu::widened<config.v, true>(by_dim);
          }
#pragma unroll
          for (int c = 0; c < columns; ++c)
            gpu::multiply<config.element, false>(state.O[v][c], a, b[c][2 * half], b[c][2 * half + 1]);
        }
      }
    }
  }
  // Which dim of a value tile a thread's value e of O is.
  __device__ int dim_of(int e) const {
    return 16 * warp + (eight_bits(config.v) ? lane / 4 * 2 + e / 2 : lane / 4 + e / 2 * 8);
  }
};

}  // namespace tessera::decode
