// The shared memory of the one-pass backward kernel, and the threads that serve its consumers: one takes blocks of
// keys, one copies the keys, which stay, and the tiles of queries, which stream past; where dQ is summed in order, one
// waits for each tile's turn and one passes it on. Device text.
#pragma once

#include "sm90/kernel/one_pass_work.cuh"
#include "sm90/ptx/memory.cuh"
#include "sm90/ptx/tma.cuh"

namespace tessera::sm90 {

template <OnePassConfig config>
struct OnePassShared {
  static constexpr OnePassLayout layout = layout_of(config);
  unsigned char* const base;

  __device__ UInt32 K(int slot, int warpgroup) const {
    return at(layout.K + (slot * one_pass_warpgroups + warpgroup) * layout.K_bytes);
  }
  __device__ UInt32 V(int slot, int warpgroup) const {
    return at(layout.V + (slot * one_pass_warpgroups + warpgroup) * layout.V_bytes);
  }
  __device__ UInt32 Q(int stage) const { return at(layout.Q + stage * layout.Q_bytes); }
  __device__ UInt32 dO(int stage) const { return at(layout.dO + stage * layout.dO_bytes); }
  __device__ UInt32 dS(int stage) const { return at(layout.dS + stage * layout.dS_bytes); }
  __device__ float* numbers(int stage) const {
    return reinterpret_cast<float*>(base + layout.numbers) + stage * numbers_of(config);
  }
  __device__ UInt32& is_first(int stage) const {
    return reinterpret_cast<UInt32*>(base + layout.first)[stage];
  }  // nobody has added to the tile
  __device__ OnePassWork<config>& work(int slot) const {
    return reinterpret_cast<OnePassWork<config>*>(base + layout.work)[slot];
  }

  // full: what the place holds is here. empty: it is no longer read; of work, its keys as well. turn: the tile's sum
  // may be added to. written: it has been. seen: the turn's place is free again.
  __device__ Barrier& work_full(int slot) const { return barrier(slot); }
  __device__ Barrier& work_empty(int slot) const { return barrier(key_slots + slot); }
  __device__ Barrier& keys_full(int slot) const { return barrier(2 * key_slots + slot); }
  __device__ Barrier& full(int stage) const { return barrier(3 * key_slots + stage); }
  __device__ Barrier& empty(int stage) const { return barrier(3 * key_slots + config.stages + stage); }
  __device__ Barrier& turn(int stage) const { return barrier(3 * key_slots + 2 * config.stages + stage); }
  __device__ Barrier& written(int stage) const { return barrier(3 * key_slots + 3 * config.stages + stage); }
  __device__ Barrier& seen(int stage) const { return barrier(3 * key_slots + 4 * config.stages + stage); }

  __device__ void init_barriers() const {
    constexpr int consumer_warps = 4 * one_pass_warpgroups, servants = config.ordered ? 3 : 1;
    for (int s = 0; s < key_slots; ++s)
      work_full(s).init(1), work_empty(s).init(servants + consumer_warps), keys_full(s).init(1);
    for (int s = 0; s < config.stages; ++s) {
      full(s).init(1), empty(s).init(consumer_warps);
      turn(s).init(1), written(s).init(consumer_warps), seen(s).init(1);
    }
    publish_barriers();
  }

 private:
  __device__ UInt32 at(int offset) const { return shared_address(base) + offset; }
  __device__ Barrier& barrier(int n) const { return reinterpret_cast<Barrier*>(base + layout.barriers)[n]; }
};

// Beside the consumers, a thread of each of four warps.
template <OnePassConfig config>
struct OnePassServants {
  static constexpr OnePassLayout layout = layout_of(config);
  static constexpr int queries = config.block_queries;
  const OnePassParams& p;
  const OnePassShared<config>& shared;

  // Takes block after block. Where blocks wait for each other they are taken in order: who waits, waits for one that
  // somebody works on.
  __device__ void take_works() const {
    for (RingPlace<key_slots> slot;; slot.advance()) {
      shared.work_empty(slot.stage).wait(slot.parity ^ 1);
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
      shared.work_full(slot.stage).wait(slot.parity);
      const OnePassWork<config>& work = shared.work(slot.stage);
      if (work.is_end()) return;
      f(work, slot.stage);
      shared.work_empty(slot.stage).arrive();
    }
  }

  __device__ void load_keys(const OnePassWork<config>& w, int slot) const {
    Barrier& full = shared.keys_full(slot);
    full.expect(one_pass_warpgroups * (layout.K_bytes + layout.V_bytes));
    for (int g = 0; g < one_pass_warpgroups; ++g) {
      const TilePlace place{w.key_begin + w.first + 64 * g, w.kv, w.tensor_b};
      load_tile<64, config.D / 64>(shared.K(slot, g), p.k, full, place, pass_through_cache);
      load_tile<64, config.Dv / 64>(shared.V(slot, g), p.v, full, place, pass_through_cache);
    }
  }

  __device__ void load_queries(const TileWalk<config>& at, int stage) const {
    const TilePlace place{at.w.query_begin + at.tile * queries, at.w.head + at.head, at.w.tensor_b};
    constexpr int number_bytes = numbers_of(config) * 4;
    Barrier& full = shared.full(stage);
    full.expect(layout.Q_bytes + layout.dO_bytes + number_bytes);
    load_tile<queries, config.D / 64>(shared.Q(stage), p.q, full, place, keep_in_cache);
    load_tile<queries, config.Dv / 64>(shared.dO(stage), p.d_o, full, place, keep_in_cache);
    load_bytes<number_bytes>(shared_address(shared.numbers(stage)),
                             p.memory.numbers + Int64(at.number(p.memory)) * numbers_of(config), full);
  }

  __device__ void load() const {
    RingPlace<config.stages> place;
    for_works([&](const OnePassWork<config>& w, int slot) {
      if (w.has_tiles())
        load_keys(w, slot);
      else
        shared.keys_full(slot).arrive();  // a phase for each work
      for (TileWalk<config> at{w}; at.has_more(); at.advance(), place.advance()) {
        shared.empty(place.stage).wait(place.parity ^ 1);
        load_queries(at, place.stage);
      }
    });
  }

  // A tile's turn has come when all blocks of earlier keys have added to it.
  __device__ void wait_for_turns() const {
    RingPlace<config.stages> place;
    for_works([&](const OnePassWork<config>& w, int) {
      for (TileWalk<config> at{w}; at.has_more(); at.advance(), place.advance()) {
        const UInt32 turn = w.turn_at(at.tile);
        shared.seen(place.stage).wait(place.parity ^ 1);
        wait_for_count(p.memory.counts + at.number(p.memory), turn);
        shared.is_first(place.stage) = turn == 0;
        shared.turn(place.stage).arrive();
      }
    });
  }

  // What the consumers have added becomes visible to the block whose turn is next.
  __device__ void pass_turns_on() const {
    RingPlace<config.stages> place;
    for_works([&](const OnePassWork<config>& w, int) {
      for (TileWalk<config> at{w}; at.has_more(); at.advance(), place.advance()) {
        shared.written(place.stage).wait(place.parity);
        shared.seen(place.stage).arrive();
        count_one_more(p.memory.counts + at.number(p.memory));
      }
    });
  }

  __device__ void serve() const {
    const int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 > 0) return;
    if (warp == 0) load();
    if (warp == 1) take_works();
    if (config.ordered && warp == 2) wait_for_turns();
    if (config.ordered && warp == 3) pass_turns_on();
  }
};

}  // namespace tessera::sm90
