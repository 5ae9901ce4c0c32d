// The Hopper forward kernel: one warp copies tiles of K and V into rings of shared memory, two or three warpgroups of
// 64 queries each multiply them on the tensor cores. The softmax of one tile runs while O takes in the tile before, and
// while the other warpgroups multiply. Device text; implements docs/algorithm.md, "Online softmax".
#pragma once

#include "sm90/kernel/softmax.cuh"
#include "sm90/kernel/work.cuh"
#include "sm90/ptx/barrier.cuh"
#include "sm90/ptx/tma.cuh"
#include "sm90/ptx/wgmma.cuh"

namespace tessera::sm90 {

template <Config config>
struct Shared {
  static constexpr Layout layout = layout_of(config);
  unsigned char* const base;

  __device__ UInt32 Q(int warpgroup) const { return shared_address(base) + layout.Q + warpgroup * layout.q_bytes; }
  __device__ UInt32 K(int stage) const { return shared_address(base) + layout.K + stage * layout.k_bytes; }
  __device__ UInt32 V(int stage) const { return shared_address(base) + layout.V + stage * layout.v_bytes; }
  __device__ UInt32 O(int warpgroup) const { return shared_address(base) + layout.O + warpgroup * layout.o_bytes; }

  // full: the producer's bytes are here. empty: the consumers no longer read them.
  __device__ Barrier& q_full(int warpgroup) const { return barrier(warpgroup); }
  __device__ Barrier& q_empty(int warpgroup) const { return barrier(config.warpgroups + warpgroup); }
  __device__ Barrier& k_full(int stage) const { return barrier(2 * config.warpgroups + stage); }
  __device__ Barrier& k_empty(int stage) const { return barrier(2 * config.warpgroups + config.stages + stage); }
  __device__ Barrier& v_full(int stage) const { return barrier(2 * config.warpgroups + 2 * config.stages + stage); }
  __device__ Barrier& v_empty(int stage) const { return barrier(2 * config.warpgroups + 3 * config.stages + stage); }

  __device__ void init_barriers() const {
    for (int w = 0; w < config.warpgroups; ++w) q_full(w).init(1), q_empty(w).init(1);
    for (int s = 0; s < config.stages; ++s) {
      k_full(s).init(1), k_empty(s).init(config.warpgroups);
      v_full(s).init(1), v_empty(s).init(config.warpgroups);
    }
    publish_barriers();
  }

 private:
  __device__ Barrier& barrier(int n) const { return reinterpret_cast<Barrier*>(base + layout.barriers)[n]; }
};

// --- the producer: one thread

template <Config config>
__device__ void produce(const ForwardParams& p, const Shared<config>& shared) {
  constexpr Layout layout = layout_of(config);
  RingPlace<config.stages> k, v;
  UInt32 q_parity = 0;
  for (Int32 number = blockIdx.x; number < p.tiles; number += gridDim.x) {
    const Work w = work_of<config>(p, number);
    if (w.empty()) continue;
    const auto load_K = [&](Int32 n) {
      shared.k_empty(k.stage).wait(k.parity ^ 1);
      shared.k_full(k.stage).expect(layout.k_bytes);
      load_tile<config.block_keys, config.D / 64>(shared.K(k.stage), p.k, shared.k_full(k.stage),
                                                  w.keys(p, n * config.block_keys), keep_in_cache);
      k.advance();
    };
    const auto load_V = [&](Int32 n) {
      shared.v_empty(v.stage).wait(v.parity ^ 1);
      shared.v_full(v.stage).expect(layout.v_bytes);
      load_tile<config.block_keys, config.Dv / 64>(shared.V(v.stage), p.v, shared.v_full(v.stage),
                                                   w.keys(p, n * config.block_keys), keep_in_cache);
      v.advance();
    };
    load_K(w.begin);
    for (int g = 0; g < config.warpgroups; ++g) {
      shared.q_empty(g).wait(q_parity ^ 1);
      shared.q_full(g).expect(layout.q_bytes);
      load_tile<64, config.D / 64>(shared.Q(g), p.q, shared.q_full(g), w.queries(p, 64 * g), pass_through_cache);
    }
    q_parity ^= 1;
    for (Int32 n = w.begin + 1; n < w.end; ++n) load_K(n), load_V(n - 1);
    load_V(w.end - 1);
  }
}

// --- a consumer: a warpgroup

template <Config config>
struct Consumer {
  static constexpr int keys = config.block_keys;
  using State = Rows<config>;
  using Probabilities = typename State::Probabilities;

  const ForwardParams& p;
  const Shared<config>& shared;
  const int warpgroup, thread = threadIdx.x % 128;
  const bool leads = thread == 0;
  RingPlace<config.stages> k, v;
  UInt32 q_parity = 0;
  float S[keys / 2], O[config.Dv / 2];

  __device__ Consumer(const ForwardParams& p, const Shared<config>& shared, int warpgroup) :
      p(p), shared(shared), warpgroup(warpgroup) {}

  // S = Q K^T. Only begins it.
  __device__ void begin_QK() {
    shared.k_full(k.stage).wait(k.parity);
    const Operand q = along_rows(shared.Q(warpgroup)), key = along_rows(shared.K(k.stage));
    begin_products();
    Wgmma<keys>::set(S, q, key);
#pragma unroll
    for (int n = 1; n < config.D / 16; ++n)
      Wgmma<keys>::add(S, q.plus(step_along_rows(64, n)), key.plus(step_along_rows(keys, n)));
    commit_products();
  }

  // O += P V. Only begins it.
  __device__ void begin_PV(const Probabilities& P) {
    shared.v_full(v.stage).wait(v.parity);
    const Operand value = over_rows(shared.V(v.stage), keys);
    begin_products();
#pragma unroll
    for (int n = 0; n < keys / 16; ++n) Wgmma<config.Dv>::add(O, &P[4 * n], value.plus(step_over_rows(n)));
    commit_products();
  }

  __device__ void release_K() {
    if (leads) shared.k_empty(k.stage).arrive();
    k.advance();
  }
  __device__ void release_V() {
    if (leads) shared.v_empty(v.stage).arrive();
    v.advance();
  }

  __device__ void scale_O(float first, float second) {
#pragma unroll
    for (int n = 0; n < config.Dv / 2; ++n) O[n] *= n / 2 % 2 == 0 ? first : second;
  }

  // Tile n: its S is multiplied together with the PV of the tile before, whose P is `before`; its softmax, which writes
  // `P`, runs under that PV.
  __device__ void step(State& rows, const Band<config>& band, Int32 n, const Probabilities& before, Probabilities& P) {
    begin_QK();
    if (rows.shifted) scale_O(rows.alpha[0], rows.alpha[1]);
    begin_PV(before);
    wait_products<1>();
    arrived(S);
    release_K();
    if (band.cuts(n)) {
      hide<config>(S, band, accumulator_row(thread, 0), n * keys + accumulator_column(thread, 0));
      rows.online(S, P);
    } else {
      rows.steady(S, P);
    }
    wait_products<0>();
    arrived(O);
    release_V();
  }

  // The last tile's rows beyond the sequence have P = 0, but memory may hold NaN there, and 0 NaN is NaN: they become
  // 0. Every warpgroup does this for itself.
  __device__ void clear_unused_V(int used) {
    shared.v_full(v.stage).wait(v.parity);
    const UInt32 tile = shared.V(v.stage);
    constexpr int chunks = config.Dv / chunk_columns;
    for (int n = used * chunks + thread; n < keys * chunks; n += 128)
      clear_chunk(tile + tile_byte(keys, n / chunks, n % chunks * chunk_columns));
    publish_shared();
    sync_threads(1 + warpgroup, 128);
  }

  __device__ void finish_PV(const State& rows, const Probabilities& P, int used) {
    if (leads && !config.O_in_Q) shared.q_empty(warpgroup).arrive();
    if (rows.shifted) scale_O(rows.alpha[0], rows.alpha[1]);
    if (used < keys) clear_unused_V(used);
    begin_PV(P);
    wait_products<0>();
    arrived(O);
    release_V();
  }

  // A sink is a key with this score and no value; one lane of each row counts it.
  __device__ void add_sink(State& rows, float sink) {
    if (sink == minus_infinity<float>) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) rows.m[r] = sink * simt::log2e, rows.l[r] = thread % 4 == 0 ? 1 : 0;
  }

  __device__ void attend(State& rows, Int32 number) {
    const Work w = work_of<config>(p, number);
    const Band<config> band(w, w.first + 64 * warpgroup);
    // Rows of the last tile that belong to the sequence, where what follows in memory is another's.
    const int used = w.s.k_begin + w.s.nk < p.call.x.Nk ? int(lesser(w.s.nk - Int64(w.end - 1) * keys, keys)) : keys;
    Probabilities P, other;  // in turn: a P in the tensor cores' hands must not be written
    shared.q_full(warpgroup).wait(q_parity);
    q_parity ^= 1;
    begin_QK();
    wait_products<0>();
    arrived(S);
    release_K();
    if (band.cuts(w.begin))
      hide<config>(S, band, accumulator_row(thread, 0), w.begin * keys + accumulator_column(thread, 0));
    rows.online(S, P);
    rows.shifted = false;
#pragma unroll
    for (int n = 0; n < config.Dv / 2; ++n) O[n] = 0;
    Int32 n = w.begin + 1;
    for (; n + 1 < w.end; n += 2) step(rows, band, n, P, other), step(rows, band, n + 1, other, P);
    if (n < w.end) {
      step(rows, band, n, P, other);
      finish_PV(rows, other, used);
    } else {
      finish_PV(rows, P, used);
    }
  }

  // O / l, by way of shared memory, and LSE. Where the tile lies is asked only when O has left the registers.
  __device__ void write(const State& rows, Int32 number) {
    const float sum[2] = {quad_sum(rows.l[0]), quad_sum(rows.l[1])};
    scale_O(sum[0] == 0 ? 0 : 1 / sum[0], sum[1] == 0 ? 0 : 1 / sum[1]);
    if (leads) wait_stores_read();  // of the tile before
    sync_threads(1 + warpgroup, 128);
    const UInt32 tile = shared.O(warpgroup);
#pragma unroll
    for (int n = 0; n < config.Dv / 16; ++n) {
      const float* o = &O[8 * n];
      store_matrix(tile + tile_byte(64, store_row(thread), store_column(thread, n)), packed<config.element>(o[0], o[1]),
                   packed<config.element>(o[2], o[3]), packed<config.element>(o[4], o[5]),
                   packed<config.element>(o[6], o[7]));
    }
    publish_shared();
    sync_threads(1 + warpgroup, 128);

    const Work w = work_of<config>(p, afresh(number));
    for (int r = 0; r < 2; ++r) {
      const Int64 i = w.first + 64 * warpgroup + accumulator_row(thread, 2 * r);
      if (thread % 4 == 0 && p.call.lse.data && i < w.s.nq)
        *simt::number_of(p.call.lse, w.b, w.s.q_begin + i, w.h) =
            simt::natural_lse(r == 0 ? rows.m[0] : rows.m[1], r == 0 ? sum[0] : sum[1]);
    }
    const Int64 valid = w.s.nq - w.first - 64 * warpgroup;
    const bool partly = valid < 64 && w.s.q_begin + w.s.nq < p.call.x.Nq;  // what follows in memory is not ours
    if (partly) copy_rows(tile, w, valid);
    if (partly && config.O_in_Q) sync_threads(1 + warpgroup, 128);
    if (!leads) return;
    if (!partly) store_tile<64, config.Dv / 64>(p.o, tile, w.queries(p, 64 * warpgroup));
    if constexpr (config.O_in_Q) {
      wait_stores_read();
      shared.q_empty(warpgroup).arrive();
    }
  }

  // The first `valid` rows of O's tile, without a tensor copy.
  __device__ void copy_rows(UInt32 tile, const Work& w, Int64 valid) {
    for (int row = thread / 32; row < valid; row += 4) {
      const Int64 token = w.s.q_begin + w.first + 64 * warpgroup + row;
      auto* o = simt::row_of<config.element>(p.call.o, w.b, token, w.h);
      for (int d = thread % 32; d < p.Dv; d += 32) o[d] = {load_element(tile + tile_byte(64, row, d))};
    }
  }

  // Queries that see no key: O = 0, LSE = -inf, or the sink. The rings and Q's memory, which the producer may be
  // filling for the next tile, are left alone.
  __device__ void write_nothing(const Work& w) {
    for (int row = thread / 32; row < 64; row += 4) {
      const Int64 i = w.first + 64 * warpgroup + row;
      if (i >= w.s.nq) return;
      auto* o = simt::row_of<config.element>(p.call.o, w.b, w.s.q_begin + i, w.h);
      for (int d = thread % 32; d < p.Dv; d += 32) o[d] = {};
      if (thread % 32 == 0 && p.call.lse.data)
        *simt::number_of(p.call.lse, w.b, w.s.q_begin + i, w.h) =
            p.call.x.sinks ? p.call.x.sinks[w.h * p.call.x.sink_head] : minus_infinity<float>;
    }
  }

  // What a tile is, is asked again where it is needed: kept, it would take registers from the products.
  __device__ void consume() {
    for (Int32 number = blockIdx.x; number < p.tiles; number += gridDim.x) {
      if (work_of<config>(p, number).empty()) {
        write_nothing(work_of<config>(p, number));
        continue;
      }
      State rows{.factor = p.call.x.scale * simt::log2e};
      if (p.call.x.sinks) add_sink(rows, p.call.x.sinks[work_of<config>(p, number).h * p.call.x.sink_head]);
      attend(rows, afresh(number));
      write(rows, number);
    }
    if (leads) wait_stores();
  }
};

template <Config config>
__device__ void forward(const ForwardParams& p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Shared<config> shared{memory};
  if (threadIdx.x == 0) {
    shared.init_barriers();
    prefetch(p.q), prefetch(p.k), prefetch(p.v), prefetch(p.o);
  }
  __syncthreads();
  const int role = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (role == 0) {
    give_registers<producer_registers(config)>();
    if (threadIdx.x == 0) produce<config>(p, shared);
  } else {
    take_registers<consumer_registers(config)>();
    Consumer<config>(p, shared, role - 1).consume();
  }
}

}  // namespace tessera::sm90
