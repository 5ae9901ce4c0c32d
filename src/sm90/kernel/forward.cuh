// SPDX-License-Identifier: Apache-2.0
// The Hopper forward kernel: persistent and warp-specialised. A scheduler thread and a producer thread (the loader)
// feed two or three consumer warpgroups of 64 queries each. The softmax of one tile overlaps with P V of the tile
// before. Device code; implements docs/algorithm.md, "Online softmax".
#pragma once

#include "gpu/kernel/scores.cuh"
#include "sm90/kernel/epilogue.cuh"
#include "sm90/kernel/loader.cuh"
#include "sm90/kernel/paged_loader.cuh"
#include "sm90/kernel/scheduler.cuh"

namespace tessera::sm90 {

// A consumer: a warpgroup.
template <Config config>
struct Consumer {
  static constexpr int keys = config.block_keys;
  using State = Rows<config>;
  using Probabilities = typename State::Probabilities;

  const ForwardParams& p;
  const Shared<config>& shared;
  const int warpgroup, thread = threadIdx.x % 128;
  const bool leads = thread == 0;
  const Epilogue<config> epilogue{p, shared, warpgroup};
  RingPlace<work_slots> slot;
  UInt32 work_parity = 0;  // of the barriers of the slot in work
  RingPlace<config.q_stages> q;
  RingPlace<config.stages> k, v;
  float S[keys / 2], rest_of_S[config.halves_S ? keys / 2 : 1], O[config.Dv / 2];

  __device__ Consumer(const ForwardParams& p, const Shared<config>& shared, int warpgroup) :
      p(p), shared(shared), warpgroup(warpgroup) {}

  // --- The rings: wait, release, pass over

  __device__ void sync_warpgroup() { sync_threads(1 + warpgroup, 128); }

  // One thread gives a stage back for all: the products that read it have ended for the whole warpgroup.
  __device__ void release_Q() {
    if (leads) shared.q_empty(q.stage, warpgroup).arrive();
    q.advance();
  }
  __device__ void release_K() {
    if (leads) shared.K().empty(k.stage).arrive();
    k.advance();
  }
  __device__ void release_V() {
    if (leads) shared.V().empty(v.stage).arrive();
    v.advance();
  }

  // Skips stages whose keys only other warpgroups see. All threads of the warpgroup wait for `full` before one of them
  // releases the stage: a released stage may be filled again, which ends a second phase, and a thread that has not
  // looked yet would find the same parity as before and wait for a third.
  __device__ void pass_K(Int32 count) {
    for (; count > 0; --count) {
      shared.K().wait_full(k);
      sync_warpgroup();
      release_K();
    }
  }
  __device__ void pass_V(Int32 count) {
    for (; count > 0; --count) {
      shared.V().wait_full(v);
      sync_warpgroup();
      release_V();
    }
  }

  // Warpgroups begin a work one after another, each with the tensor cores for itself until it has its first S. Then
  // they stay out of phase: one's softmax overlaps with the products of the others. In phase, all would wait for
  // products and then all for exponentials.
  __device__ void await_turn(const Work<config>& w) {
    if (warpgroup > 0) shared.first_S(shared.slot_of(w), warpgroup - 1).wait(work_parity);
  }
  __device__ void give_turn(const Work<config>& w) {
    if (warpgroup + 1 < config.warpgroups && leads) shared.first_S(shared.slot_of(w), warpgroup).arrive();
  }

  // The next tile of queries. It is in work until its slot is released, when no other thread needs it any more.
  __device__ const Work<config>& next_work() {
    wait_full(shared.work_full(slot.stage), slot);
    const Work<config>& w = shared.work(slot.stage);
    work_parity = slot.parity;
    slot.advance();
    return w;
  }
  __device__ void release_work(const Work<config>& w) {
    if (leads) shared.work_empty(shared.slot_of(w)).arrive();
  }

  // --- The products: issued here, awaited in `attend`

  __device__ UInt32 Q() const { return shared.Q(q.stage, warpgroup); }
  __device__ UInt32 K() const { return shared.K().tile(k.stage); }
  __device__ UInt32 V() const { return shared.V().tile(v.stage); }

  // S = Q K^T
  __device__ void begin_S(UInt32 Q, UInt32 K) {
    constexpr int steps = config.D / 16;
    begin_products();
    if constexpr (config.halves_S) {
      multiply_QK<0, steps / 2>(S, Q, K);
      multiply_QK<steps / 2, steps>(rest_of_S, Q, K);
    } else {
      multiply_QK<0, steps>(S, Q, K);
    }
    commit_products();
  }
  template <int first, int end>
  __device__ void multiply_QK(float (&sums)[keys / 2], UInt32 Q, UInt32 K) {
    multiply_along_rows<keys, config.element, config.halves_S, first, end>(sums, along_rows(Q), along_rows(K));
  }
  __device__ void collect_S() {
    arrived(S);
    if constexpr (config.halves_S) {
      arrived(rest_of_S);
#pragma unroll
      for (int e = 0; e < keys / 2; ++e) S[e] += rest_of_S[e];
    }
  }

  // O += P V
  __device__ void begin_O(const Probabilities& P, UInt32 V) {
    begin_products();
    multiply_over_rows<config.Dv, config.element, keys>(O, P, over_rows(V, keys), true);
    commit_products();
  }

  // Before the next P V, if the last softmax has changed the base of its exponentials.
  __device__ void rescale_O(const State& rows) {
    if (rows.shifted) scale_rows(O, rows.alpha[0], rows.alpha[1]);
  }

  // The last tile's rows beyond the sequence have P = 0, but memory may hold NaN there, and 0 NaN is NaN: they become
  // 0. Every warpgroup does this for itself.
  __device__ void clear_unused_V(const Work<config>& w) {
    const int used = w.used;
    if (used >= keys || w.own_end[warpgroup] != w.end) return;
    shared.V().wait_full(v);
    clear_rows<keys, config.Dv>(V(), thread, used, [](int) { return true; });
    publish_shared();
    sync_warpgroup();
  }

  // --- The softmax of a tile of keys

  // A row's state before its first tile. A sink is a key with its own score and no value; one lane of a row counts it,
  // or `resume`.
  __device__ State fresh_rows(const Work<config>& w) const {
    State rows{.factor = config.general ? 1 : p.factor};
    const float sink = p.call.x.sinks ? p.call.x.sinks[w.h * p.call.x.sink_head] : minus_infinity<float>;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!config.carried && sink != minus_infinity<float>) {
        rows.base[r] = sink * log2e<float>, rows.bound[r] = 0;
        rows.l[r] = thread % 4 == 0 ? 1 : 0;
      }
      if (w.query(warpgroup, accumulator_row(thread, 2 * r)) >= w.queries) rows.bound[r] = State::no_row;
    }
    return rows;
  }

  // Carried: what rows begin with, which a call before this one has left.
  __device__ void resume(State& rows, const Work<config>& w) {
    const gpu::StateRef& in = states_of(p).in;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Int32 i = w.query(warpgroup, accumulator_row(thread, 2 * r));
      if (i >= w.queries) continue;
      const Int64 row = w.q_begin + i;
      const gpu::RowState state = gpu::first_state(p.call.x, in, w.b, row, w.h);
      rows.resume(r, state.m, float(state.l));
      if (in.o.data) add_row<config.Dv>(O, r, thread, gpu::row_of<Element::f32>(in.o, w.b, row, w.h), p.Dv, true);
    }
  }

  // S of tile n becomes P, packed; with one buffer it stays in the place of S, for `State::pack`. `first`: of these
  // queries. `cut`: the band of the mask, or the sequence's end, cuts the tile.
  template <bool first>
  __device__ void softmax(State& rows, const Work<config>& w, Int32 n, bool cut, Probabilities& P) {
    if constexpr (config.general) {
      score_one_by_one(rows, w, n, cut);
    } else {
      if (cut) hide_outside_band(w, n);
      if constexpr (config.p_buffers == 1)
        rows.online_in_place(S, [](int) { return 1.f; });
      else if constexpr (config.carried)
        rows.carry(S, P);
      else if constexpr (first)
        rows.online(S, P);
      else
        rows.steady(S, P);
    }
  }

  __device__ void hide_outside_band(const Work<config>& w, Int32 n) {
    const Int32 distance = 64 * warpgroup - n * keys;
    hide<keys>(S, thread, w.low + distance, w.high + distance, w.keys - n * keys);
  }

  __device__ void score_one_by_one(State& rows, const Work<config>& w, Int32 n, bool cut) {
    const gpu::DeviceSequence s{0, 0, w.queries, w.keys, w.shift, {}};
    const gpu::ScoreOf<config.options> score(p.call.x, s, w.b, w.h);
    const gpu::ScoreTile tile(s, w.query(warpgroup, 0), 64, Int64(n) * keys, keys);
#pragma unroll
    for (int e = 0; e < keys / 2; ++e)
      S[e] = score(S[e], tile, accumulator_row(thread, e), accumulator_column(thread, e));
    if (cut) hide_outside_band(w, n);
    // The factor of the keys that dropout keeps comes last, in f32: times that, a P of 1 would be rounded.
    rows.online_in_place(S, [&](int e) {
      return score.keep(tile, accumulator_row(thread, e), accumulator_column(thread, e)) == 0 ? 0.f : 1.f;
    });
  }

  // --- The pipeline

  // Attends the queries of `w`, of which this warpgroup's see keys.
  __device__ void attend(const Work<config>& w) {
    Probabilities P, next_P;
    State rows = fresh_rows(w);
#pragma unroll
    for (float& o : O) o = 0;
    if constexpr (config.carried) resume(rows, w);
    const Int32 first = w.own_begin[warpgroup], end = w.own_end[warpgroup], skipped = first - w.begin;
    const Int32 full_begin = w.full_begin[warpgroup], full_end = w.full_end[warpgroup];
    const auto cuts = [&](Int32 n) { return n < full_begin || n >= full_end; };

    // Prologue: S and softmax of the first tile of keys. No P V overlaps with them.
    wait_full(shared.q_full(q.stage, warpgroup), q);
    pass_K(skipped);
    shared.K().wait_full(k);
    await_turn(w);
    begin_S(Q(), K());
    wait_products<0>();
    give_turn(w);
    collect_S();
    release_K();
    if (first + 1 == end) release_Q();
    softmax<true>(rows, w, first, cuts(first), P);
    pass_V(skipped);
    if constexpr (config.p_buffers == 1) State::pack(P, S);
    if constexpr (!config.carried) rows.shifted = false;  // O is 0

    // Steady state: S of tile n and P V of the tile before are issued together. The softmax of tile n, which makes
    // `next_P`, overlaps with that P V. Double-buffered, it does not wait for the tensor cores to have read P.
    const auto turn = [&](Int32 n, const Probabilities& P, Probabilities& next_P) {
      shared.K().wait_full(k);
      begin_S(Q(), K());
      rescale_O(rows);
      shared.V().wait_full(v);
      begin_O(P, V());
      wait_products<1>();
      collect_S();
      release_K();
      if (n + 1 == end) release_Q();  // early: the producer waits for it
      softmax<false>(rows, w, n, cuts(n), next_P);
      wait_products<0>();
      arrived(O);
      release_V();
      if constexpr (config.p_buffers == 1) State::pack(next_P, S);
    };
    // Epilogue: the last P V, alone. It stands in the code twice: a copy of P would make ptxas serialise the products.
    const auto last_turn = [&](const Probabilities& P) {
      rescale_O(rows);
      clear_unused_V(w);
      shared.V().wait_full(v);
      begin_O(P, V());
      wait_products<0>();
      arrived(O);
      release_V();
    };
    Int32 n = first + 1;
    if constexpr (config.p_buffers == 1) {
      for (; n < end; ++n) turn(n, P, P);
      last_turn(P);
    } else {
      for (; n + 1 < end; n += 2) turn(n, P, next_P), turn(n + 1, next_P, P);
      if (n < end)
        turn(n, P, next_P), last_turn(next_P);
      else
        last_turn(P);
    }
    pass_K(w.end - end), pass_V(w.end - end);
    epilogue.write(O, rows, w);
  }

  // Queries that see nothing of what other warpgroups see.
  __device__ void pass_over(const Work<config>& w) {
    await_turn(w), give_turn(w);
    if (w.empty()) return;
    wait_full(shared.q_full(q.stage, warpgroup), q);
    sync_warpgroup();
    release_Q();
    for (Int32 n = w.begin; n < w.end; ++n) pass_K(1), pass_V(n > w.begin);
    pass_V(1);
  }

  __device__ void consume() {
    // A condition and not a break: only then does ptxas see that all lanes have the same stages.
    const Work<config>* work = &next_work();
    while (!work->none()) {
      if (!work->empty(warpgroup)) {
        attend(*work);
      } else {
        pass_over(*work);
        epilogue.write_nothing(*work);
        sync_warpgroup();
      }
      release_work(*work);
      work = &next_work();
    }
    if (leads) wait_stores();
  }
};

template <Config config>
__device__ void forward(const Params<config>& p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Shared<config> shared{memory};
  if (threadIdx.x == 0) {
    shared.init_barriers();
    prefetch(p.q);
    if constexpr (!config.paged) prefetch(p.k), prefetch(p.v);
    if constexpr (config.stages_O) prefetch(p.o);
  }
  __syncthreads();
  const int role = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (role == 0) {
    static_assert(registers_suffice(config.warpgroups, producer_registers(config), consumer_registers(config)));
    give_registers<producer_registers(config)>();
    if constexpr (config.paged) {
      // They return: a warp that asked for its next role would keep its number in a register.
      if (threadIdx.x < 32) return PagedLoader<config>(p, shared).load_keys();
      if (threadIdx.x >= 64 && threadIdx.x < 96) return PagedLoader<config>(p, shared).load_values();
    } else {
      if (threadIdx.x == 0) Loader<config>(p, shared).load();
    }
    if (threadIdx.x == 32) schedule<config>(p, shared);
  } else {
    take_registers<consumer_registers(config)>();
    Consumer<config>(p, shared, role - 1).consume();
  }
}

}  // namespace tessera::sm90
