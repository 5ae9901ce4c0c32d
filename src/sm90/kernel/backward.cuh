// SPDX-License-Identifier: Apache-2.0
// The Hopper backward kernels, one per side: each block is the only writer of its rows, so they are deterministic. A
// loader warp (backward_loader.cuh) feeds two or three warpgroups, of 64 rows each or paired: queries, which see keys
// stream past and sum dQ, or keys, which see the queries of every head of the group and sum dK and dV. Of keys S, P, dP
// and dS are the transposed ones. Device code; implements docs/algorithm.md, "Backward, tile by tile".
#pragma once

#include "gpu/kernel/scores.cuh"
#include "sm90/kernel/backward_loader.cuh"
#include "sm90/tile/accumulator.cuh"

namespace tessera::sm90 {

// What a warpgroup computes of a tile: everything, or its half of a pair's work.
//
// Pairs are for keys with D and Dv so wide that dK and dV of 64 keys, (D + Dv) / 2 registers of a thread, leave none
// for S and dP. Two kernels, one for dK and one for dV, would compute S twice, 5 products instead of 4, and so would a
// pair in which each half computes S for itself. Here the first half has S and dV and the second dP and dK, two
// products of equal size each, and P, in f32, is written and read once: 1/9 of what a tile moves in shared memory,
// where one more S would be 1/5. A thread's counterpart in the other half holds the same elements of the tile, so that
// they may lie in any order, and lie without conflicts. The price is that a block has 64 keys, not 128: every tile of
// queries is loaded twice as often (D=256: 32 bytes per clock and multiprocessor, of 38 that the L2 cache gives).
enum class Part { all, P, dS };

// A consumer: a warpgroup.
template <BackwardConfig config, Part part>
struct BackwardConsumer {
  static constexpr int columns = config.block_columns;
  static constexpr bool queries = owns_queries(config);
  static constexpr bool computes_S = part != Part::dS;
  static constexpr bool wants_dQK = config.dQK != Element::none && part != Part::P;
  static constexpr bool wants_dV = config.dV != Element::none && part != Part::dS;

  const BackwardParams& p;
  const BackwardShared<config>& shared;
  const BackwardWork<config>& w;
  const int warpgroup, thread = threadIdx.x % 128;
  const int own = config.paired ? 0 : warpgroup;  // which 64 rows
  // Places in the two rings: one for both, where they are equally long.
  static constexpr bool in_step = config.stages == config.vo_stages;
  RingPlace<config.stages> qk_place;
  RingPlace<in_step ? 1 : config.vo_stages> shorter_vo_place;
  RingPlace<config.paired ? slots_of_P(config) : 1> slot;
  float S[columns / 2];
  float dP[wants_dQK || config.halves_S ? columns / 2 : 1];  // before that, the other half of S
  // Operands of the products that sum: P has a place of its own only if dV needs it.
  UInt32 packed_P[wants_dV ? columns / 4 : 1], packed_dS[wants_dQK ? columns / 4 : 1];
  float dQK[wants_dQK ? config.D / 2 : 1] = {}, dV[wants_dV ? config.Dv / 2 : 1] = {};
  float lse2[2], delta[2];  // of queries that are rows

  __device__ BackwardConsumer(const BackwardParams& p, const BackwardShared<config>& shared,
                              const BackwardWork<config>& w, int warpgroup) :
      p(p),
      shared(shared), w(w), warpgroup(warpgroup) {}

  __device__ void sync_warpgroup() { sync_threads(1 + warpgroup, 128); }
  // Each warp for itself, when all its lanes have read: numbers, too, which no product waits for.
  __device__ void arrive_as_warp(Barrier& barrier) {
    __syncwarp();
    if (thread % 32 == 0) barrier.arrive();
  }

  __device__ void read_numbers_of_rows() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Int32 i = w.row(own, accumulator_row(thread, 2 * r));
      const Int64 at = w.row_head * p.call.row_head + w.b * p.call.row_batch + w.row_begin + i;
      lse2[r] = i < w.rows ? p.call.lse2[at] : -minus_infinity<float>;
      delta[r] = i < w.rows ? p.call.delta[at] : 0;
    }
  }

  __device__ const auto& vo_place() const {
    if constexpr (in_step)
      return qk_place;
    else
      return shorter_vo_place;
  }
  __device__ void advance() { qk_place.advance(), shorter_vo_place.advance(); }
  __device__ void release_QK(int stage) { arrive_as_warp(shared.column_QK().empty(stage)); }
  __device__ void release_VO(int stage) { arrive_as_warp(shared.column_VO().empty(stage)); }

  // Skips stages that only other warpgroups see. All threads wait for `full` before one of them releases the stage, or
  // a late one would miss a phase of the same parity (see forward.cuh).
  __device__ void pass(Int32 count) {
    for (; count > 0; --count, advance()) {
      shared.column_QK().wait_full(qk_place), shared.column_VO().wait_full(vo_place());
      sync_warpgroup();
      release_QK(qk_place.stage), release_VO(vo_place().stage);
    }
  }

  // The tiles in work.
  __device__ UInt32 row_QK() const { return shared.row_QK(own); }
  __device__ UInt32 row_VO() const { return shared.row_VO(own); }
  __device__ UInt32 column_QK() const { return shared.column_QK().tile(qk_place.stage); }
  __device__ UInt32 column_VO() const { return shared.column_VO().tile(vo_place().stage); }

  // What P and dS need of value n's query.
  __device__ float lse2_of(int n) const {
    if constexpr (queries) return lse2[n / 2 % 2];
    return shared.lse2(qk_place.stage)[accumulator_column(thread, n)];
  }
  __device__ float delta_of(int n) const {
    if constexpr (queries) return delta[n / 2 % 2];
    return shared.delta(qk_place.stage)[accumulator_column(thread, n)];
  }

  // Columns with P = 0 for all rows may hold NaN: keys of others, or nobody's; queries that see nothing.
  __device__ void clear_unused(Int32 tile) {
    if constexpr (queries) {
      const Int32 used = w.columns - tile * columns;
      if (used >= columns || !w.others_follow) return;
      clear_columns(used, [](int) { return true; });
    } else {
      if (!shared.blind(qk_place.stage)) return;
      const float* numbers = shared.lse2(qk_place.stage);
      clear_columns(0, [&](int n) { return numbers[n] == -minus_infinity<float>; });
    }
  }
  template <class Unused>
  __device__ void clear_columns(int first, Unused unused) {
    shared.column_VO().wait_full(vo_place());
    clear_rows<columns, config.D>(column_QK(), thread, first, unused);
    clear_rows<columns, config.Dv>(column_VO(), thread, first, unused);
    publish_shared();
    sync_warpgroup();
  }

  // --- The products: issued here, awaited in `sum`

  // S = row_QK column_QK^T, but halves of S are waited for and added.
  __device__ void begin_S(UInt32 row_QK, UInt32 column_QK) {
    constexpr int steps = config.D / 16;
    begin_products();
    multiply_S<0, config.halves_S ? steps / 2 : steps>(S, row_QK, column_QK);
    if constexpr (config.halves_S) multiply_S<steps / 2, steps>(dP, row_QK, column_QK);
    commit_products();
    if constexpr (config.halves_S) {
      wait_products<0>();
      arrived(S), arrived(dP);
#pragma unroll
      for (int n = 0; n < columns / 2; ++n) S[n] += dP[n];
    }
  }
  template <int first, int end>
  __device__ void multiply_S(float (&sums)[columns / 2], UInt32 row_QK, UInt32 column_QK) {
    multiply_along_rows<columns, config.element, config.halves_S, first, end>(sums, along_rows(row_QK),
                                                                              along_rows(column_QK));
  }
  // dP = row_VO column_VO^T
  __device__ void begin_dP(UInt32 row_VO, UInt32 column_VO) {
    begin_products();
    multiply_along_rows<columns, config.element, config.halves_S, 0, config.Dv / 16>(dP, along_rows(row_VO),
                                                                                     along_rows(column_VO));
    commit_products();
  }
  // dV += P column_VO
  __device__ void begin_dV(UInt32 column_VO) {
    begin_products();
    multiply_over_rows<config.Dv, config.element, columns>(dV, packed_P, over_rows(column_VO, columns), true);
    commit_products();
  }
  // dQK += dS column_QK
  __device__ void begin_dQK(UInt32 column_QK) {
    begin_products();
    multiply_over_rows<config.D, config.element, columns>(dQK, packed_dS, over_rows(column_QK, columns), true);
    commit_products();
  }

  // --- P and dS of a tile

  // P, in the place of S.
  __device__ void exponentiate(Int32 tile) {
    const Int32 first = w.row(own, 0), column = tile * columns;
    const bool whole =
        column >= first + 63 + w.low && column + columns - 1 <= first + w.high && column + columns <= w.columns;
    if (!whole) hide<columns>(S, thread, w.low + first - column, w.high + first - column, w.columns - column);
#pragma unroll
    for (int n = 0; n < columns / 2; ++n) S[n] = exp2_of(fmaf(S[n], p.factor, -lse2_of(n)));
  }

  __device__ void pack_P() {
#pragma unroll
    for (int n = 0; n < columns / 2; n += 2) packed_P[n / 2] = packed<config.element>(S[n], S[n + 1]);
  }

  // With options, P is packed at once. In the place of S comes what dS is a multiple of, P times the score's
  // derivative, and negative where dropout takes the key away: so one number is all that dS needs. `head` of the query.
  __device__ void exponentiate_one_by_one(Int32 head, Int32 tile) {
    const Int32 row = w.row(own, 0), column = tile * columns;
    const gpu::DeviceSequence s{0, 0, queries ? w.rows : w.columns, queries ? w.columns : w.rows, w.shift, {}};
    const gpu::ScoreOf<config.options> score(p.call.x, s, w.b, head);
    const gpu::ScoreTile at =
        queries ? gpu::ScoreTile(s, row, 64, column, columns) : gpu::ScoreTile(s, column, columns, row, 64);
    SeenColumns seen[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      seen[r] = seen_columns(thread, r, w.low + row - column, w.high + row - column, w.columns - column);
    const auto sees = [&](int n) {
      const int c = n / 4 * 8 + n % 2, r = n / 2 % 2;
      return seen[r].first <= c && c <= seen[r].last;
    };
#pragma unroll
    for (int n = 0; n < columns / 2; n += 2) {
      float kept[2];
#pragma unroll
      for (int e = n; e < n + 2; ++e) {
        const int r = accumulator_row(thread, e), c = accumulator_column(thread, e);
        const int query = queries ? r : c, key = queries ? c : r;
        float derivative = 1;
        S[e] = score(S[e], at, query, key, config.options.need_derivative() ? &derivative : nullptr);
        const float P = sees(e) ? exp2_of(S[e] - lse2_of(e)) : 0, keep = score.keep(at, query, key);
        kept[e - n] = P * keep;
        S[e] = keep == 0 ? -P * derivative : P * derivative;
      }
      if constexpr (wants_dV) packed_P[n / 2] = packed<config.element>(kept[0], kept[1]);
    }
  }

  __device__ float dS_of(int n) const {
    if constexpr (!config.options.dropout) return S[n] * (dP[n] - delta_of(n));
    return fabsf(S[n]) * ((S[n] < 0 ? 0 : dP[n] * p.call.x.keep_scale) - delta_of(n));
  }
  __device__ void pack_dS() {
#pragma unroll
    for (int n = 0; n < columns / 2; n += 2) packed_dS[n / 2] = packed<config.element>(dS_of(n), dS_of(n + 1));
  }

  // From one half of a pair to the other.
  __device__ void give_P() {
    wait_empty(shared.P_empty(slot.stage), slot);
#pragma unroll
    for (int n = 0; n < columns / 8; ++n)
      shared.P(slot.stage, thread, n) = {S[4 * n], S[4 * n + 1], S[4 * n + 2], S[4 * n + 3]};
    __syncwarp();
    arrive_as_warp(shared.P_full(slot.stage));
    slot.advance();
  }
  __device__ void take_P() {
    wait_full(shared.P_full(slot.stage), slot);
#pragma unroll
    for (int n = 0; n < columns / 8; ++n) {
      const float4 four = shared.P(slot.stage, thread, n);
      S[4 * n] = four.x, S[4 * n + 1] = four.y, S[4 * n + 2] = four.z, S[4 * n + 3] = four.w;
    }
    __syncwarp();
    arrive_as_warp(shared.P_empty(slot.stage));
    slot.advance();
  }

  // --- The pipeline

  __device__ void sum() {
    if constexpr (queries) read_numbers_of_rows();
    if (w.begin >= w.end) return;
    shared.rows_full(own).wait(0);

    // The gradient products of a tile overlap with the scores of the next one, unless the kernel drains: the stages
    // that they read, at `before`, are released when they have ended.
    int before = -1;
    static_assert(in_step || !wants_dV, "one stage stands for both rings");
    const auto release_summed = [&] {
      if (before < 0) return;
      if constexpr (wants_dQK) release_QK(before);
      if constexpr (wants_dV) release_VO(before);
    };
    const Int32 end = w.own_end[own];  // in a register: shared memory is busy
    for (Int32 head = 0; head < w.heads; ++head) {
      pass(w.own_begin[own] - w.begin);
      for (Int32 tile = w.own_begin[own]; tile < end; ++tile) {
        shared.column_QK().wait_full(qk_place);
        clear_unused(tile);
        if constexpr (computes_S) begin_S(row_QK(), column_QK());
        if constexpr (wants_dQK) {
          shared.column_VO().wait_full(vo_place());
          begin_dP(row_VO(), column_VO());
        }
        if constexpr (!config.drains) {
          wait_products<computes_S + wants_dQK>();
          release_summed();
        }

        if constexpr (computes_S) {
          wait_products<wants_dQK ? 1 : 0>();
          arrived(S);
          if constexpr (config.general)
            exponentiate_one_by_one(queries ? w.row_head : w.head + head, tile);
          else
            exponentiate(tile);
        }
        if constexpr (part == Part::P) give_P();
        if constexpr (part == Part::dS) take_P();
        if constexpr (wants_dV) {
          if constexpr (!config.general) pack_P();
          if constexpr (!wants_dQK) shared.column_VO().wait_full(vo_place());  // dP has not waited for it
          begin_dV(column_VO());
        }

        if constexpr (wants_dQK) {
          wait_products<wants_dV ? 1 : 0>();
          arrived(dP);
          if constexpr (!wants_dV) release_VO(vo_place().stage);  // which only dP reads
          pack_dS();
          begin_dQK(column_QK());
        } else {
          release_QK(qk_place.stage);  // which only S reads
        }
        before = qk_place.stage;
        if constexpr (config.drains) {
          wait_products<0>();
          release_summed();
        }
        advance();
      }
      pass(w.end - end);
    }
    wait_products<0>();
    if constexpr (wants_dQK) arrived(dQK);
    if constexpr (wants_dV) arrived(dV);
  }

  template <Element element, int width>
  __device__ void write(float (&sums)[width / 2], const gpu::TokenRef& to, int count, float factor) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Int32 i = w.row(own, accumulator_row(thread, 2 * r));
      auto* row = gpu::row_of<element>(to, w.b, w.row_begin + i, w.row_head);
      const bool sees = !queries || lse2[r] != -minus_infinity<float>;
#pragma unroll
      for (int n = 2 * r; n < width / 2; n += 4)
#pragma unroll
        for (int e = 0; e < 2; ++e) sums[n + e] = sees ? sums[n + e] * factor : 0;
      if constexpr (element == Element::f32)  // no other type accumulates
        if (p.call.accumulate) add_row<width>(sums, r, thread, row, count, i < w.rows);
      store_row<element, width>(sums, r, thread, row, count, i < w.rows);
    }
  }

  __device__ void consume() {
    sum();
    if constexpr (wants_dQK) write<config.dQK, config.D>(dQK, queries ? p.call.dq : p.call.dk, p.D, p.call.x.scale);
    if constexpr (wants_dV) write<config.dV, config.Dv>(dV, p.call.dv, p.Dv, 1);
  }
};

template <BackwardConfig config>
__device__ void backward(const BackwardParams& p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const BackwardShared<config> shared{memory};
  if (threadIdx.x == 0) {
    shared.work().find(p.call.x);
    shared.init_barriers();
    prefetch(p.row_QK), prefetch(p.row_VO), prefetch(p.column_QK), prefetch(p.column_VO);
  }
  __syncthreads();
  const BackwardWork<config>& work = shared.work();
  if (work.none()) return;
  const int role = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (role == 0) {
    static_assert(registers_suffice(config.warpgroups, producer_registers(config), consumer_registers(config)));
    give_registers<producer_registers(config)>();
    if (threadIdx.x < BackwardLoader<config>::lanes) BackwardLoader<config>{p, shared, work}.load();
  } else {
    take_registers<consumer_registers(config)>();
    if constexpr (!config.paired)
      BackwardConsumer<config, Part::all>(p, shared, work, role - 1).consume();
    else if (role == 1)
      BackwardConsumer<config, Part::P>(p, shared, work, 0).consume();
    else
      BackwardConsumer<config, Part::dS>(p, shared, work, 1).consume();
  }
}

}  // namespace tessera::sm90
