// SPDX-License-Identifier: Apache-2.0
// The shared memory of the one-pass backward kernel, and the threads that serve its consumers: one takes blocks of
// keys, one copies the keys, which stay, and the tiles of queries, which stream past, and two add dQ of a tile each to
// its sum in memory, in order or as it comes. Device code.
#pragma once

#include "sm90/kernel/one_pass_work.cuh"
#include "sm90/ptx/memory.cuh"
#include "sm90/ptx/tma.cuh"
#include "sm90/tile/ring.cuh"

namespace tessera::sm90 {

template <OnePassConfig config>
struct OnePassShared {
  static constexpr OnePassLayout layout = layout_of(config);
  unsigned char* const base;

  __device__ UInt32 K(int slot, int warpgroup) const {
    return at(layout.K + (slot * one_pass_warpgroups + warpgroup) * layout.K_bytes);
  }
  __device__ UInt32 V(int warpgroup) const { return at(layout.V + warpgroup * layout.V_bytes); }
  // Q's barriers stand for a tile's numbers, too. dS is written and read by the consumers.
  static constexpr int others = one_pass_work_barriers;
  using QRing = Ring<config.stages, layout.Q, layout.Q_bytes, others>;
  using DORing = Ring<config.stages, layout.dO, layout.dO_bytes, others + 2 * config.stages>;
  using DSRing = Ring<config.stages, layout.dS, layout.dS_bytes, others + 4 * config.stages>;
  __device__ QRing Q() const { return {base, barriers()}; }
  __device__ DORing dO() const { return {base, barriers()}; }
  __device__ DSRing dS() const { return {base, barriers()}; }
  __device__ UInt32 dQ(int part = 0) const { return at(layout.dQ + part * part_bytes); }
  __device__ float* numbers(int stage) const {
    return reinterpret_cast<float*>(base + layout.numbers) + stage * numbers_of(config);
  }
  __device__ OnePassWork<config>& work(int slot) const {
    return reinterpret_cast<OnePassWork<config>*>(base + layout.work)[slot];
  }

  // full: what the place holds is here. empty: it is no longer read; of work, its K as well. loaded: all of a work has
  // been asked for. ahead: the first warpgroup has made its P of a work's first tile.
  __device__ Barrier& work_full(int slot) const { return barrier(slot); }
  __device__ Barrier& work_empty(int slot) const { return barrier(key_slots + slot); }
  __device__ Barrier& K_full(int slot) const { return barrier(2 * key_slots + slot); }
  __device__ Barrier& V_full() const { return barrier(3 * key_slots); }
  __device__ Barrier& V_empty() const { return barrier(3 * key_slots + 1); }
  __device__ Barrier& loaded() const { return barrier(3 * key_slots + 2); }
  __device__ Barrier& ahead() const { return barrier(3 * key_slots + 3); }
  __device__ Barrier& dQ_full(int adder) const { return barrier(others + 6 * config.stages + adder); }
  __device__ Barrier& dQ_empty() const { return barrier(others + 6 * config.stages + dQ_adders); }

  __device__ void init_barriers() const {
    constexpr int servants = 1 + dQ_adders, consumer_warps = 4 * one_pass_warpgroups;
    for (int s = 0; s < key_slots; ++s)
      work_full(s).init(1), work_empty(s).init(servants + consumer_warps), K_full(s).init(1);
    V_full().init(1), V_empty().init(consumer_warps), loaded().init(1), ahead().init(4);
    Q().init(1, consumer_warps), dO().init(1, consumer_warps), dS().init(consumer_warps, consumer_warps);
    for (int adder = 0; adder < dQ_adders; ++adder) dQ_full(adder).init(consumer_warps);
    dQ_empty().init(1);
    publish_barriers();
  }

 private:
  __device__ UInt32 at(int offset) const { return shared_address(base) + offset; }
  __device__ Barrier* barriers() const { return reinterpret_cast<Barrier*>(base + layout.barriers); }
  __device__ Barrier& barrier(int n) const { return barriers()[n]; }
};

// Beside the consumers, a thread of each of four warps.
template <OnePassConfig config>
struct OnePassServants {
  static constexpr OnePassLayout layout = layout_of(config);
  static constexpr int queries = config.block_queries;
  const OnePassParams& p;
  const OnePassShared<config>& shared;

  // Takes block after block. Where blocks wait for each other they are taken in order: who waits, waits for one that
  // somebody works on, or is about to: the next is taken when the last tile of the one in work has been asked for.
  __device__ void take_works() const {
    RingPlace<1> loaded;
    for (RingPlace<key_slots> slot;; slot.advance(), loaded.advance()) {
      wait_empty(shared.loaded(), loaded);
      wait_empty(shared.work_empty(slot.stage), slot);
      const UInt32 number = atomicAdd(p.memory.taken, 1u);
      OnePassWork<config>& work = shared.work(slot.stage);
      Barrier& full = shared.work_full(slot.stage);
      if (number >= UInt32(p.memory.blocks)) {
        work.be_end();
        full.arrive();
        return;
      }
      full.expect(one_pass_work_bytes);
      load_bytes<one_pass_work_bytes>(shared_address(&work),
                                      static_cast<const OnePassWork<config>*>(p.memory.works) + number, full);
    }
  }

  // Calls f(work, slot) for each block of keys that is taken.
  template <class Function>
  __device__ void for_works(Function f) const {
    for (RingPlace<key_slots> slot;; slot.advance()) {
      wait_full(shared.work_full(slot.stage), slot);
      const OnePassWork<config>& work = shared.work(slot.stage);
      if (work.is_end()) return;
      f(work, slot.stage);
      shared.work_empty(slot.stage).arrive();
    }
  }

  // K or V of a work, in `barrier`'s care.
  template <int columns>
  __device__ void load_keys(const OnePassWork<config>& w, const TensorMap& map, UInt32 to, Barrier& barrier) const {
    constexpr int bytes = 64 * columns * 2;
    barrier.expect(one_pass_warpgroups * bytes);
    for (int g = 0; g < one_pass_warpgroups; ++g)
      load_tile<64, columns / 64>(to + g * bytes, map, barrier, {w.key_begin + w.first + 64 * g, w.kv, w.tensor_b},
                                  pass_through_cache);
  }

  // dO of a tile is done with before its Q, and both before V of the work: V's place is free in the last tile of the
  // work before, when the first tile of this one has long had its own.
  __device__ void load() const {
    RingPlace<config.stages> place;
    RingPlace<1> v;
    for_works([&](const OnePassWork<config>& w, int slot) {
      if (!w.has_tiles()) {  // these two have a phase for each work
        shared.K_full(slot).arrive(), shared.loaded().arrive();
        return;
      }
      load_keys<config.D>(w, p.k, shared.K(slot, 0), shared.K_full(slot));
      bool first = true;
      for (TileWalk<config> at(w); at.has_more(); at.advance(), place.advance()) {
        const TilePlace from{w.query_begin + at.tile * queries, at.head, w.tensor_b};
        shared.dO().wait_empty(place);
        load_dO(from, place.stage);
        shared.Q().wait_empty(place);
        load_Q(from, at.number(p.memory, w), place.stage);
        if (first) {
          wait_empty(shared.V_empty(), v);
          load_keys<config.Dv>(w, p.v, shared.V(0), shared.V_full());
          v.advance(), first = false;
        }
      }
      shared.loaded().arrive();
    });
  }

  __device__ void load_dO(const TilePlace& from, int stage) const {
    Barrier& full = shared.dO().full(stage);
    full.expect(layout.dO_bytes);
    load_tile<queries, config.Dv / 64>(shared.dO().tile(stage), p.d_o, full, from, keep_in_cache);
  }
  __device__ void load_Q(const TilePlace& from, Int32 tile, int stage) const {
    constexpr int number_bytes = numbers_of(config) * 4;
    Barrier& full = shared.Q().full(stage);
    full.expect(layout.Q_bytes + number_bytes);
    load_tile<queries, config.D / 64>(shared.Q().tile(stage), p.q, full, from, keep_in_cache);
    load_bytes<number_bytes>(shared_address(shared.numbers(stage)), p.memory.numbers + Int64(tile) * numbers_of(config),
                             full);
  }

  // dQ of every other tile to its sum: it takes longer than a tile until what was added is there. In order: when all
  // blocks of earlier keys have added to the tile, the first one of them only stores; what has been added becomes
  // visible to the block whose turn is next, and behind a fence between proxies to its bulk copies, too.
  __device__ void add_up(int adder) const {
    RingPlace<1> place;
    int other_tiles = adder;  // to be left to others first
    for_works([&](const OnePassWork<config>& w, int) {
      for (TileWalk<config> at(w); at.has_more(); at.advance()) {
        if (--other_tiles >= 0) continue;
        other_tiles = dQ_adders - 1;
        const Int64 number = at.number(p.memory, w);
        float* to = p.memory.sums + number * parts_of(config) * part_numbers;
        const UInt32 turn = config.ordered ? w.turn_at(at.tile) : 1;
        if constexpr (config.ordered) wait_for_count(p.memory.counts + number, turn);
        wait_full(shared.dQ_full(adder), place);
        place.advance();
        publish_shared();                                // what the consumers wrote
        if constexpr (config.ordered) publish_global();  // and what other blocks have added
        if (turn == 0)
          store_bytes<parts_of(config) * part_bytes>(to, shared.dQ());
        else
          add_floats<parts_of(config) * part_bytes>(to, shared.dQ());
        wait_stores_read();
        shared.dQ_empty().arrive();
        if constexpr (config.ordered) {
          wait_stores();
          count_one_more(p.memory.counts + number);
        }
      }
    });
    wait_stores();
  }

  __device__ void serve() const {
    const int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 > 0) return;
    if (warp == 0) load();
    if (warp == 1) take_works();
    if (warp >= 2) add_up(warp - 2);
  }
};

}  // namespace tessera::sm90
