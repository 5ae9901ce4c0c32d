// SPDX-License-Identifier: Apache-2.0
// The Hopper backward kernel that makes dQ, dK and dV in one pass over the scores. A block of threads owns 128 keys,
// 64 for each of two warpgroups, and sums their dK and dV in registers while the queries of every head of the group
// stream past; what they add to dQ goes to sums in memory, from which sm90/kernel/finish.cuh makes dQ. S, P, dP and dS
// are the transposed ones: rows are keys. Device code; implements docs/algorithm.md, "Backward, tile by tile".
#pragma once

#include "sm90/kernel/one_pass_loader.cuh"
#include "sm90/tile/accumulator.cuh"

namespace tessera::sm90 {

// A consumer: a warpgroup.
template <OnePassConfig config>
struct OnePassConsumer {
  static constexpr int queries = config.block_queries;
  static_assert(parts_of(config) == one_pass_warpgroups);

  // Prefetched numbers of LSE, as many as there are registers for: shared memory is busy, and its latency would show.
  static constexpr int read_ahead = 16;

  using Work = OnePassWork<config>;

  const OnePassParams& p;
  const OnePassShared<config>& shared;
  const int warpgroup, thread = threadIdx.x % 128;
  RingPlace<key_slots> slot;
  RingPlace<config.stages> place;
  RingPlace<1> v, out;  // of V, and of dQ on its way to memory
  // Where K is of the tile whose dQ is still to be multiplied, if there is one.
  static constexpr int nowhere = key_slots;
  int late_slot = nowhere;
  float S[queries / 2], dP[queries / 2];
  UInt32 packed_P[queries / 4], packed_dS[queries / 4];
  float dK[config.D / 2], dV[config.Dv / 2], dQ[32];
  float first_lse2[read_ahead];

  __device__ OnePassConsumer(const OnePassParams& p, const OnePassShared<config>& shared, int warpgroup) :
      p(p), shared(shared), warpgroup(warpgroup) {}

  __device__ void sync_warpgroup() const { sync_threads(1 + warpgroup, 128); }
  __device__ Int32 first_key(const Work& w) const { return w.first + 64 * warpgroup; }
  // Each warp for itself: its lanes also read numbers, which no product waits for.
  __device__ void arrive_by_warp(Barrier& barrier) const {
    if (thread % 32 == 0) barrier.arrive();
  }
  __device__ void release_Q(int stage) const { arrive_by_warp(shared.Q().empty(stage)); }
  __device__ void release_dO(int stage) const { arrive_by_warp(shared.dO().empty(stage)); }
  __device__ void release_dS(int stage) const { arrive_by_warp(shared.dS().empty(stage)); }
  __device__ void release_V() const { arrive_by_warp(shared.V_empty()); }
  __device__ void release_work(int slot) const { arrive_by_warp(shared.work_empty(slot)); }  // and its K

  // The tiles in work: this warpgroup's 64 keys, and the queries in `place`.
  __device__ UInt32 K() const { return shared.K(slot.stage, warpgroup); }
  __device__ UInt32 V() const { return shared.V(warpgroup); }
  __device__ UInt32 Q() const { return shared.Q().tile(place.stage); }
  __device__ UInt32 dO() const { return shared.dO().tile(place.stage); }

  // Rows of K or V that are others', or nobody's, count as 0 in dQ. Memory may hold NaN there.
  template <int columns>
  __device__ void clear_absent_keys(const Work& w, UInt32 tile) const {
    if (w.first + one_pass_keys <= w.keys) return;
    clear_rows<64, columns>(tile, thread, w.keys > first_key(w) ? w.keys - first_key(w) : 0, [](int) { return true; });
    publish_shared();
    sync_warpgroup();
  }

  // Queries that see nothing, or do not exist, have P = 0, and memory may hold NaN.
  __device__ void clear_blind_queries() const {
    const float* lse2 = shared.numbers(place.stage);
    if (lse2[blind_at(config)] == 0) return;
    const auto blind = [&](int n) { return lse2[n] == -minus_infinity<float>; };
    clear_rows<queries, config.D>(Q(), thread, 0, blind);
    clear_rows<queries, config.Dv>(dO(), thread, 0, blind);
    publish_shared();
    sync_warpgroup();
  }

  // Of the tile in `place`. dO is needed later, but was loaded earlier.
  __device__ void wait_for_queries() const {
    shared.Q().wait_full(place);
    shared.dO().wait_full(place);
    clear_blind_queries();
  }

  // --- The products: issued here, awaited in `sum` and `consume`

  // S = K Q^T
  __device__ void begin_S(UInt32 K, UInt32 Q, bool used) {
    judge_races(used);
    begin_products();
    multiply_along_rows<queries, config.element, false, 0, config.D / 16>(S, along_rows(K), along_rows(Q));
    commit_products();
    judge_races(true);
  }
  // dP = V dO^T
  __device__ void begin_dP(UInt32 V, UInt32 dO) {
    begin_products();
    multiply_along_rows<queries, config.element, false, 0, config.Dv / 16>(dP, along_rows(V), along_rows(dO));
    commit_products();
  }
  // dV += P dO
  __device__ void begin_dV(UInt32 dO) {
    begin_products();
    multiply_over_rows<config.Dv, config.element, queries>(dV, packed_P, over_rows(dO, queries), true);
    commit_products();
  }
  // dK += dS Q
  __device__ void begin_dK(UInt32 Q) {
    begin_products();
    multiply_over_rows<config.D, config.element, queries>(dK, packed_dS, over_rows(Q, queries), true);
    commit_products();
  }
  // This warpgroup's part of dQ = dS^T K, over the keys of both.
  __device__ void begin_dQ(UInt32 dS, int K_slot) {
    using Product = Wgmma<64, config.element>;
    const Operand rows = along_rows(dS + part_row(config, warpgroup) * panel_row_bytes);
    begin_products();
#pragma unroll
    for (int g = 0; g < one_pass_warpgroups; ++g) {
      const UInt32 panel = shared.K(K_slot, g) + part_column(config, warpgroup) * panel_row_bytes;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const Operand a = rows.plus(step_along_rows(queries, 4 * g + k));
        const Operand b = over_rows(panel, 64).plus(step_over_rows(k));
        g + k == 0 ? Product::set_over_rows(dQ, a, b) : Product::add_over_rows(dQ, a, b);
      }
    }
    commit_products();
  }

  // Of the tile before the one in `place`, once both warpgroups' dS is there. Before the very first tile there is none:
  // the wait ends at once, and the product is of whatever the memory holds.
  __device__ void begin_late_dQ() {
    const RingPlace<config.stages> before = place.before();
    shared.dS().wait_full(before);
    publish_shared();
    judge_races(late_slot != nowhere);
    begin_dQ(shared.dS().tile(before.stage), late_slot);
    judge_races(true);
  }

  // --- P, dS and dQ of a tile

  // Scores that the mask or the ends of the sequence leave out become -inf.
  __device__ void mask(const Work& w, Int32 tile) {
    const Int32 first = first_key(w), query = tile * queries;
    hide<queries>(S, thread, w.low + first - query, w.high + first - query, w.queries - query);
#pragma unroll
    for (int n = 0; n < queries / 2; ++n)  // rows of absent keys are 0, but exp2(0 - LSE) may be inf
      if (first + accumulator_row(thread, n) >= w.keys) S[n] = minus_infinity<float>;
  }

  // LSE of the thread's columns, two of every eight; the first of them are read while S is still multiplied.
  __device__ float lse2(int n) const {
    return shared.numbers(place.stage)[accumulator_column(thread, n / 2 * 4 + n % 2)];
  }
  __device__ void read_lse2(bool used) {
    judge_races(used);
#pragma unroll
    for (int n = 0; n < read_ahead; ++n) first_lse2[n] = lse2(n);
    judge_races(true);
  }
  // P, in the place of S.
  __device__ void exponentiate() {
#pragma unroll
    for (int n = 0; n < queries / 2; ++n) {
      const int column = n / 4 * 2 + n % 2;
      S[n] = exp2_of(fmaf(S[n], p.factor, -(column < read_ahead ? first_lse2[column] : lse2(column))));
    }
  }

  __device__ void pack_P() {
#pragma unroll
    for (int n = 0; n < queries / 2; n += 2) packed_P[n / 2] = packed<config.element>(S[n], S[n + 1]);
  }

  // dS = P (dP - delta), packed, and turned over in shared memory.
  __device__ void differentiate() {
    const float* delta = shared.numbers(place.stage) + delta_at(config);
#pragma unroll
    for (int n = 0; n < queries / 2; n += 2) {
      const float* two = &delta[accumulator_column(thread, n)];
      packed_dS[n / 2] = packed<config.element>(S[n] * (dP[n] - two[0]), S[n + 1] * (dP[n + 1] - two[1]));
    }
#pragma unroll
    for (int k = 0; k < queries / 16; ++k) {
      const UInt32* four = &packed_dS[4 * k];
      store_matrix_turned(
          shared.dS().tile(place.stage) + tile_byte(queries, turned_row(thread, k), turned_column(thread, warpgroup)),
          four[0], four[1], four[2], four[3]);
    }
  }

  // To the thread that adds this tile's to the sum in memory, as soon as there is room.
  __device__ void wait_to_hand_over() const { wait_empty(shared.dQ_empty(), out); }
  __device__ void hand_over_dQ() {
    arrived(dQ);
#pragma unroll
    for (int n = 0; n < 32; n += 4) store_four(shared.dQ(warpgroup) + (128 * n + 4 * thread) * 4, &dQ[n]);
    __syncwarp();
    static_assert(dQ_adders == 2);
    arrive_by_warp(shared.dQ_full(int(out.parity)));  // tile by tile
    out.advance();
  }

  // --- The pipeline

  // The loop over a work's tiles; S of the first is here. The tensor cores overlap with everything else: dP with P, dV
  // with dS, the next tile's S with dQ's way out. And while one warpgroup makes P, the other multiplies: they work half
  // a tile apart. So that neither has to wait for the other's dS, dQ is multiplied a tile late, the last tile's in the
  // next work's first. In the very first tile that dQ has no meaning, after the last tile S has none, and they are not
  // used: a branch around products would make the compiler wait for them one by one. For the same reason nothing is
  // under way at the loop's end.
  __device__ void sum(const Work& w) {
    if (!w.has_tiles()) return;
    wait_full(shared.V_full(), v);
    v.advance();
    clear_absent_keys<config.Dv>(w, V());
    const auto [whole_begin, whole_end] = w.whole_tiles(first_key(w));
    for (TileWalk<config> at(w); at.has_more();) {
      const bool first = late_slot != slot.stage, late = late_slot != nowhere;
      begin_dP(V(), dO());
      if (at.tile < whole_begin || at.tile >= whole_end) mask(w, at.tile);
      if (first && warpgroup == 1) shared.ahead().wait(v.parity ^ 1);
      exponentiate();
      shared.dS().wait_empty(place);
      pack_P();
      begin_dV(dO());
      if (first && warpgroup == 0) arrive_by_warp(shared.ahead());
      wait_products<1>();
      arrived(dP);
      differentiate();
      __syncwarp();
      arrive_by_warp(shared.dS().full(place.stage));
      begin_dK(Q());
      at.advance();
      wait_products<1>();
      release_dO(place.stage);
      if (!at.has_more()) release_V();
      begin_late_dQ();
      const int stage = place.stage, late_stage = place.before().stage;
      place.advance();
      if (at.has_more()) wait_for_queries();
      begin_S(K(), Q(), at.has_more());
      wait_products<1>();
      release_Q(stage);
      if (late) {
        release_dS(late_stage);
        if (first) release_work(late_slot);  // whose dK and dV have left
        wait_to_hand_over();
      }
      read_lse2(at.has_more());  // no sooner: a wait in a loop would wait for what is read, too
      if (late) hand_over_dQ();
      late_slot = slot.stage;
      wait_products<0>();
      arrived(S);
    }
  }

  // dQ of the last tile, where no work with tiles comes next. Until then that K stays, and so would the next but one's
  // work not come.
  __device__ void finish_dQ() {
    begin_late_dQ();
    wait_products<0>();
    release_dS(place.before().stage);
    release_work(late_slot);
    wait_to_hand_over();
    hand_over_dQ();
    late_slot = nowhere;
  }

  // Until the work in `slot` is here, with its keys and first queries, if it has any.
  __device__ void wait_for_work() {
    wait_full(shared.work_full(slot.stage), slot);
    const Work& w = shared.work(slot.stage);
    if (!w.has_tiles()) return;
    wait_full(shared.K_full(slot.stage), slot);
    clear_absent_keys<config.D>(w, K());
    wait_for_queries();
    read_lse2(true);
  }

  template <Element element, int width>
  __device__ void write(const Work& w, float (&sums)[width / 2], const gpu::TokenRef& to, int count, float factor) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Int32 j = first_key(w) + accumulator_row(thread, 2 * r);
      auto* row = gpu::row_of<element>(to, w.b, w.key_begin + j, w.kv);
#pragma unroll
      for (int n = 2 * r; n < width / 2; n += 4)
#pragma unroll
        for (int e = 0; e < 2; ++e) sums[n + e] *= factor;
      if constexpr (element == Element::f32)  // no other type accumulates
        if (p.call.accumulate) add_row<width>(sums, r, thread, row, count, j < w.keys);
      store_row<element, width>(sums, r, thread, row, count, j < w.keys);
    }
  }

  __device__ void consume() {
    // A branch by warpgroups, for the compiler: it now takes it for certain that a warp's threads are of one warpgroup.
    // Otherwise what all of them share takes registers of each of them, more than there are.
    if (warpgroup == 1) __syncwarp();

    // Prologue: the first work's first S.
    wait_for_work();
    begin_S(K(), Q(), shared.work(slot.stage).has_tiles());
    wait_products<0>();
    arrived(S);
    while (!shared.work(slot.stage).is_end()) {
      const Work& w = shared.work(slot.stage);
#pragma unroll
      for (float& x : dK) x = 0;
#pragma unroll
      for (float& x : dV) x = 0;
      sum(w);

      // Epilogue and the next prologue: dK and dV leave while the next work's first S is multiplied.
      slot.advance();
      wait_for_work();
      begin_S(K(), Q(), shared.work(slot.stage).has_tiles());
      arrived(dK), arrived(dV);
      if (w.has_keys()) {
        write<config.dK, config.D>(w, dK, p.call.dk, p.D, p.call.x.scale);
        write<config.dV, config.Dv>(w, dV, p.call.dv, p.Dv, 1);
      }
      __syncwarp();
      const bool more = shared.work(slot.stage).has_tiles();
      judge_races(thread % 32 == 0);  // the others may find the next work there, and have nothing to do
      if (!w.has_tiles()) release_work(slot.before().stage);
      judge_races(true);
      wait_products<0>();
      arrived(S);
      if (late_slot != nowhere && !more) finish_dQ();
    }
  }
};

template <OnePassConfig config>
__device__ void one_pass(const OnePassParams& p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const OnePassShared<config> shared{memory};
  start_kernel_after();
  if (threadIdx.x == 0) {
    shared.init_barriers();
    prefetch(p.q), prefetch(p.k), prefetch(p.v), prefetch(p.d_o);
  }
  __syncthreads();
  wait_for_kernel_before();
  const int role = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (role == 0) {
    give_registers<24>();
    OnePassServants<config>{p, shared}.serve();
  } else {
    take_registers<240>();
    OnePassConsumer<config>(p, shared, role - 1).consume();
  }
}

}  // namespace tessera::sm90
