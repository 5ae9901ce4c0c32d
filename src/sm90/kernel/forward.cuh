// The Hopper forward kernel: persistent and warp-specialised. A scheduler thread and a producer thread (the loader)
// feed two or three consumer warpgroups of 64 queries each. The softmax of one tile overlaps with P V of the tile
// before; the first S of the next queries overlaps with the last P V of these. Device text; implements
// docs/algorithm.md, "Online softmax".
#pragma once

#include "gpu/kernel/scores.cuh"
#include "sm90/kernel/loader.cuh"
#include "sm90/kernel/scheduler.cuh"
#include "sm90/tile/accumulator.cuh"
#include "sm90/tile/softmax.cuh"

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
  RingPlace<work_slots> slot;
  RingPlace<config.q_stages> q;
  RingPlace<config.stages> k, v;
  bool new_O = true;
  float S[keys / 2], rest_of_S[config.halves_S ? keys / 2 : 1], O[config.Dv / 2] = {};

  __device__ Consumer(const ForwardParams& p, const Shared<config>& shared, int warpgroup) :
      p(p), shared(shared), warpgroup(warpgroup) {}

  // Issues S = Q K^T and does not wait for it.
  __device__ void begin_QK() {
    shared.K().wait_full(k);
    begin_products();
    constexpr int steps = config.D / 16;
    if constexpr (config.halves_S) {
      multiply_QK<0, steps / 2>(S);
      multiply_QK<steps / 2, steps>(rest_of_S);
    } else {
      multiply_QK<0, steps>(S);
    }
    commit_products();
  }
  template <int first, int end>
  __device__ void multiply_QK(float (&sums)[keys / 2]) {
    multiply_along_rows<keys, config.element, config.halves_S, first, end>(
        sums, along_rows(shared.Q(q.stage, warpgroup)), along_rows(shared.K().tile(k.stage)));
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

  // Issues O += P V, or O = P V if O is new.
  __device__ void begin_PV(const Probabilities& P) {
    shared.V().wait_full(v);
    begin_products();
    multiply_over_rows<config.Dv, config.element, keys>(O, P, over_rows(shared.V().tile(v.stage), keys), !new_O);
    new_O = false;
    commit_products();
  }

  __device__ void end_PV() {
    wait_products<0>();
    arrived(O);
    release_V();
  }

  __device__ void sync_warpgroup() { sync_threads(1 + warpgroup, 128); }
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

  __device__ void scale_O(float first, float second) {
#pragma unroll
    for (int n = 0; n < config.Dv / 2; ++n) O[n] *= n / 2 % 2 == 0 ? first : second;
  }

  // The softmax of a tile of keys, once its S is here. `first`, `last`: of these queries.
  template <bool first>
  __device__ void softmax(State& rows, const Work<config>& w, Int32 n, bool last, bool cut, Probabilities& P) {
    arrived(S);
    if constexpr (config.halves_S) {
      arrived(rest_of_S);
#pragma unroll
      for (int e = 0; e < keys / 2; ++e) S[e] += rest_of_S[e];
    }
    release_K();
    if (config.q_stages == 1 && last) release_Q();  // early: the producer waits for the only stage
    if constexpr (config.general) {
      score_one_by_one(rows, w, n, cut);
    } else {
      if (cut) hide_outside_band(w, n);
      if constexpr (config.p_buffers == 1)
        rows.online_in_place(S, [](int) { return 1.f; });
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

  // One turn of the pipeline. S of tile n and P V of the tile before, whose P is `before`, are issued together; the
  // softmax of tile n, which makes `P`, overlaps with that P V.
  __device__ void step(State& rows, const Work<config>& w, Int32 n, Int32 end, const Probabilities& before,
                       Probabilities& P) {
    const bool cut = w.cuts(warpgroup, n);
    begin_QK();
    if (rows.shifted) scale_O(rows.alpha[0], rows.alpha[1]);
    begin_PV(before);
    wait_products<1>();
    softmax<false>(rows, w, n, n + 1 == end, cut, P);
    end_PV();
    if constexpr (config.p_buffers == 1) State::pack(P, S);
  }

  // The last tile's rows beyond the sequence have P = 0, but memory may hold NaN there, and 0 NaN is NaN: they become
  // 0. Every warpgroup does this for itself.
  __device__ void clear_unused_V(int used) {
    shared.V().wait_full(v);
    clear_rows<keys, config.Dv>(shared.V().tile(v.stage), thread, used, [](int) { return true; });
    publish_shared();
    sync_warpgroup();
  }

  // A row's state before its first tile. A sink is a key with its own score and no value; one lane of a row counts it.
  __device__ State fresh_rows(const Work<config>& w) const {
    State rows{.factor = config.general ? 1 : p.factor};
    const float sink = p.call.x.sinks ? p.call.x.sinks[w.h * p.call.x.sink_head] : minus_infinity<float>;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (sink != minus_infinity<float>) {
        rows.base[r] = sink * log2e<float>, rows.bound[r] = 0;
        rows.l[r] = thread % 4 == 0 ? 1 : 0;
      }
      if (w.query(warpgroup, accumulator_row(thread, 2 * r)) >= w.queries) rows.bound[r] = State::no_row;
    }
    return rows;
  }

  // O / l and LSE.
  __device__ void write(const State& rows, const Work<config>& w) {
    const float sum[2] = {gpu::quad_sum(rows.l[0]), gpu::quad_sum(rows.l[1])};
    const float whole = config.options.dropout ? p.call.x.keep_scale : 1;
    scale_O(sum[0] == 0 ? 0 : whole / sum[0], sum[1] == 0 ? 0 : whole / sum[1]);
    // Of the four lanes that share two rows, two write an LSE each.
    const int r = thread % 4;
    const Int32 i = w.query(warpgroup, accumulator_row(thread, 2 * r));
    if (r < 2 && p.call.lse.data && i < w.queries)
      *gpu::number_of(p.call.lse, w.b, w.q_begin + i, w.h) =
          gpu::natural_lse_by_mantissa(r == 0 ? rows.m(0) : rows.m(1), r == 0 ? sum[0] : sum[1]);
    if constexpr (config.stages_O) {
      copy_O(w);
    } else {
      store_O(w);
      sync_warpgroup();
    }
    release_work(w);
  }

  // The epilogue by way of shared memory and a TMA store.
  __device__ void copy_O(const Work<config>& w) {
    if (leads) wait_stores_read();  // of the tile before
    sync_warpgroup();
    const UInt32 tile = shared.O(warpgroup);
#pragma unroll
    for (int n = 0; n < config.Dv / 16; ++n) {
      const float* o = &O[8 * n];
      store_matrix(tile + tile_byte(64, store_row(thread), store_column(thread, n)), packed<config.element>(o[0], o[1]),
                   packed<config.element>(o[2], o[3]), packed<config.element>(o[4], o[5]),
                   packed<config.element>(o[6], o[7]));
    }
    // Asked before the others are let go: the leader gives the description of the work back.
    const Int32 valid = w.queries - w.query(warpgroup, 0);
    const bool others_follow = valid < 64 && w.q_begin + w.queries < p.call.x.Nq;
    publish_shared();
    sync_warpgroup();
    if (others_follow || !p.copies_O) {
      copy_rows(tile, w, valid);
      sync_warpgroup();
    } else if (leads) {
      store_tile<64, config.Dv / 64>(p.o, tile, w.queries_at(warpgroup));
    }
  }

  // The first `valid` rows of O's tile, without a tensor copy.
  __device__ void copy_rows(UInt32 tile, const Work<config>& w, Int32 valid) {
    for (int row = thread / 32; row < 64 && row < valid; row += 4) {
      auto* o = gpu::row_of<config.element>(p.call.o, w.b, w.q_begin + w.query(warpgroup, row), w.h);
      for (int d = thread % 32; d < p.Dv; d += 32) o[d] = {load_element(tile + tile_byte(64, row, d))};
    }
  }

  // The epilogue straight from registers.
  __device__ void store_O(const Work<config>& w) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Int32 i = w.query(warpgroup, accumulator_row(thread, 2 * r));
      auto* o = gpu::row_of<config.o>(p.call.o, w.b, w.q_begin + i, w.h);
      store_row<config.o, config.Dv>(O, r, thread, o, p.Dv, i < w.queries);
    }
  }

  // Queries that see no key: O = 0, LSE = -inf, or the sink.
  __device__ void write_nothing(const Work<config>& w) {
    for (int row = thread / 32; row < 64; row += 4) {
      const Int32 i = w.query(warpgroup, row);
      if (i >= w.queries) return;
      auto* o = gpu::row_of<config.o>(p.call.o, w.b, w.q_begin + i, w.h);
      for (int d = thread % 32; d < p.Dv; d += 32) o[d] = {};
      if (thread % 32 == 0 && p.call.lse.data)
        *gpu::number_of(p.call.lse, w.b, w.q_begin + i, w.h) =
            p.call.x.sinks ? p.call.x.sinks[w.h * p.call.x.sink_head] : minus_infinity<float>;
    }
  }

  // The next tile of queries. It is in work until its slot is released, when no other thread needs it any more.
  __device__ const Work<config>& next_work() {
    wait_full(shared.work_full(slot.stage), slot);
    const Work<config>& w = shared.work(slot.stage);
    slot.advance();
    return w;
  }
  __device__ void release_work(const Work<config>& w) {
    if (leads) shared.work_empty(shared.slot_of(w)).arrive();
  }

  // The prologue of the pipeline: the first tile of keys of a tile of queries. No P V overlaps with its softmax.
  __device__ void begin(State& rows, const Work<config>& w, Probabilities& P) {
    const Int32 first = w.own_begin[warpgroup], skipped = first - w.begin;
    wait_full(shared.q_full(q.stage, warpgroup), q);
    pass_K(skipped);
    begin_QK();
    wait_products<0>();
    softmax<true>(rows, w, first, first + 1 == w.own_end[warpgroup], w.cuts(warpgroup, first), P);
    pass_V(skipped);
    if constexpr (config.p_buffers == 1) State::pack(P, S);
  }

  // The pipeline's loop over the other tiles of keys. `last` issues the last P V: it is given its P.
  template <class Last>
  __device__ void go_on(State& rows, const Work<config>& w, Probabilities& P, Probabilities& other, Last last) {
    rows.shifted = false, new_O = true;
    Int32 n = w.own_begin[warpgroup] + 1;
    const Int32 end = w.own_end[warpgroup];
    if constexpr (config.p_buffers == 1) {
      for (; n < end; ++n) step(rows, w, n, end, P, P);
      last(P);
    } else {  // double-buffered: the tensor cores still read the other P
      for (; n + 1 < end; n += 2) step(rows, w, n, end, P, other), step(rows, w, n + 1, end, other, P);
      if (n < end) {
        step(rows, w, n, end, P, other);
        last(other);
      } else {
        last(P);
      }
    }
  }
  // Before the last PV.
  __device__ void end_steps(const State& rows, const Work<config>& w) {
    if constexpr (config.q_stages > 1) release_Q();
    if (rows.shifted) scale_O(rows.alpha[0], rows.alpha[1]);
    if (w.used < keys && w.own_end[warpgroup] == w.end) clear_unused_V(w.used);
  }

  // A tile of queries whose pipeline drains before the next one's begins. Returns the next.
  __device__ const Work<config>* attend_alone(const Work<config>& w) {
    Probabilities P, other;
    const Work<config>& next = next_work();
    State rows = fresh_rows(w);
    begin(rows, w, P);
    go_on(rows, w, P, other, [&](const Probabilities& P) {
      end_steps(rows, w);
      begin_PV(P);
      end_PV();
    });
    const Int32 passed = w.end - w.own_end[warpgroup];
    pass_K(passed), pass_V(passed);
    write(rows, w);
    return &next;
  }

  // Tiles of queries without a drain between them: the next queries' first S is issued together with these queries'
  // last P V. Returns the first tile of which this warpgroup's queries see no keys.
  __device__ const Work<config>* attend(const Work<config>* work) {
    Probabilities P, other;
    State rows = fresh_rows(*work);
    begin(rows, *work, P);
    while (!work->empty(warpgroup)) {
      const Work<config>&w = *work, &next = next_work();
      go_on(rows, w, P, other, [&](const Probabilities& last) {
        if (&last != &P) copy(P, last);
      });
      end_steps(rows, w);
      const State finished = rows;
      work = &next;
      Int32 passed = w.end - w.own_end[warpgroup];  // until this warpgroup's first tile of keys of the next queries
      pass_K(passed);
      if (!work->empty(warpgroup)) {
        const Int32 first = work->own_begin[warpgroup];
        const bool cut = work->cuts(warpgroup, first);
        rows = fresh_rows(*work);
        wait_full(shared.q_full(q.stage, warpgroup), q);
        pass_K(first - work->begin);
        passed += first - work->begin;
        begin_QK();
        begin_PV(P);
        wait_products<1>();
        softmax<true>(rows, *work, first, first + 1 == work->own_end[warpgroup], cut, other);
        end_PV();
      } else {
        begin_PV(P);
        end_PV();
      }
      pass_V(passed);
      write(finished, w);
      copy(P, other);  // not before O has left: ptxas would wait in the wrong place
    }
    return work;
  }

  // Queries that see nothing of what other warpgroups see.
  __device__ void pass_over(const Work<config>& w) {
    if (w.empty()) return;
    wait_full(shared.q_full(q.stage, warpgroup), q);
    sync_warpgroup();
    release_Q();
    for (Int32 n = w.begin; n < w.end; ++n) pass_K(1), pass_V(n > w.begin);
    pass_V(1);
  }

  __device__ void consume() {
    const Work<config>* work = &next_work();
    while (!work->none()) {
      if (!work->empty(warpgroup)) {
        // With one stage of Q the next queries arrive too late to overlap with. With options the softmax is long, and a
        // third inlined copy of it would take the compiler too long.
        if constexpr (!config.general && config.q_stages > 1 && config.p_buffers == 2)
          work = attend(work);
        else
          work = attend_alone(*work);
      } else {
        pass_over(*work);
        write_nothing(*work);
        sync_warpgroup();
        release_work(*work);
        work = &next_work();
      }
    }
    if (leads) wait_stores();
  }

  __device__ static void copy(Probabilities& to, const Probabilities& from) {
#pragma unroll
    for (int n = 0; n < keys / 4; ++n) to[n] = from[n];
    settled(to);
  }
};

template <Config config>
__device__ void forward(const ForwardParams& p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Shared<config> shared{memory};
  if (threadIdx.x == 0) {
    shared.init_barriers();
    prefetch(p.q), prefetch(p.k), prefetch(p.v);
    if constexpr (config.stages_O) prefetch(p.o);
  }
  __syncthreads();
  const int role = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (role == 0) {
    give_registers<producer_registers(config)>();
    if (threadIdx.x == 0) Loader<config>(p, shared).load();
    if (threadIdx.x == 32) schedule<config>(p, shared);
  } else {
    take_registers<consumer_registers(config)>();
    Consumer<config>(p, shared, role - 1).consume();
  }
}

}  // namespace tessera::sm90
