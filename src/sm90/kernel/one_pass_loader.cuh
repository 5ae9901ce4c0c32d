// What a block of the one-pass backward kernel works on, its shared memory, and the warps that serve its consumers: one
// copies the keys, which stay, and the tiles of queries, which stream past; where dQ is summed in order, one waits for
// each tile's turn and one passes it on. Device text.
#pragma once

#include "simt/kernel/common.cuh"
#include "sm90/one_pass_config.hpp"
#include "sm90/params.hpp"
#include "sm90/ptx/memory.cuh"
#include "sm90/ptx/tma.cuh"

namespace tessera::sm90 {

// One block's keys and the tiles of queries that see them, in shared memory: consumers have no registers to spare for
// it. Tokens are counted in 32 bits, as tensor copies count them.
template <OnePassConfig config>
struct OnePassWork {
  Int32 b, tensor_b;              // tensor_b: where tensor copies count sequences; all packed ones are one
  Int32 kv, head, heads;          // the head of K and V, its first query head, and how many
  Int32 first, keys, key_begin;   // the block's first key, of so many in its sequence, which begins there
  Int32 queries, query_begin;     // of the sequence
  Int32 low, high;                // key j sees queries low + j to high + j
  Int32 begin, end, tiles_begin;  // tiles of queries, at absolute positions; number of the sequence's first tile

  __device__ void find(const simt::Question& x, Int64 number) {
    constexpr Int64 block = config.block_queries;
    simt::QueryPlace place;
    keys = 0;
    if (!simt::key_place(x, one_pass_keys, place, number)) return;
    const simt::DeviceSequence& s = place.s;
    b = place.b, tensor_b = x.cu_seqlens_q.data ? 0 : place.b;
    kv = place.kv, head = place.h, heads = x.Hq / x.Hk;
    first = Int32(place.first), keys = Int32(s.nk), key_begin = Int32(s.k_begin);
    queries = Int32(s.nq), query_begin = Int32(s.q_begin);
    constexpr Int64 far = Int64(1) << 29;
    low = Int32(clamp(-s.mask.high, -far, far)), high = Int32(clamp(-s.mask.low, -far, far));
    const Range seen = visible_queries(s.mask, {first, lesser(Int64(first + one_pass_keys), s.nk)});
    begin = Int32(seen.begin / block);
    end = seen.empty() ? begin : Int32(ceil_div(seen.end, block));
    tiles_begin = Int32(simt::first_block(x.cu_seqlens_q, b, block, x.Nq));
  }

  __device__ bool none() const { return keys == 0; }
  __device__ bool no_tiles() const { return begin >= end; }
  __device__ Int32 block() const { return first / one_pass_keys; }
  // Which of the blocks that add to a tile's sum this one is, in the order of their keys.
  __device__ UInt32 turn_at(Int32 tile) const {
    const Int32 key = tile * config.block_queries - high;  // the first that the tile's first query sees
    return UInt32(block() - (key > 0 ? key : 0) / one_pass_keys);
  }
};
static_assert(sizeof(OnePassWork<OnePassConfig{}>) <= work_bytes);

// The tiles of a block in the order in which everybody takes them: the last queries first. So blocks of keys that start
// one after another come to a tile one after another, whatever the mask.
template <OnePassConfig config>
struct TileWalk {
  const OnePassWork<config>& w;
  Int32 tile = w.end - 1, head = 0;

  __device__ bool has_more() const { return head < w.heads; }
  __device__ void advance() {
    if (--tile >= w.begin) return;
    tile = w.end - 1, ++head;
  }
  // Number of the tile among those of all heads and sequences.
  __device__ Int32 number(const OnePassParams& p) const {
    return (w.head + head) * p.tiles_per_head + w.tiles_begin + tile;
  }
};

template <OnePassConfig config>
struct OnePassShared {
  static constexpr OnePassLayout layout = layout_of(config);
  unsigned char* const base;

  __device__ UInt32 K(int warpgroup) const { return at(layout.K + warpgroup * layout.K_bytes); }
  __device__ UInt32 V(int warpgroup) const { return at(layout.V + warpgroup * layout.V_bytes); }
  __device__ UInt32 Q(int stage) const { return at(layout.Q + stage * layout.Q_bytes); }
  __device__ UInt32 dO(int stage) const { return at(layout.dO + stage * layout.dO_bytes); }
  __device__ UInt32 dS(int buffer) const { return at(layout.dS + buffer * layout.dS_bytes); }
  __device__ float* lse2(int stage) const { return numbers(layout.lse2, stage); }
  __device__ float* delta(int stage) const { return numbers(layout.delta, stage); }
  __device__ UInt32& blind(int stage) const { return words(layout.blind)[stage]; }
  __device__ UInt32& is_first(int turn) const { return words(layout.first)[turn]; }  // nobody has added to the tile
  __device__ OnePassWork<config>& work() const { return *reinterpret_cast<OnePassWork<config>*>(base + layout.work); }

  // full: what the place holds is here. empty: it is no longer read. turn: the tile's sum may be added to. written: it
  // has been. seen: the turn's place is free again.
  __device__ Barrier& keys_full() const { return barrier(0); }
  __device__ Barrier& full(int stage) const { return barrier(1 + stage); }
  __device__ Barrier& empty(int stage) const { return barrier(1 + config.stages + stage); }
  __device__ Barrier& turn(int n) const { return barrier(1 + 2 * config.stages + n); }
  __device__ Barrier& written(int n) const { return barrier(1 + 2 * config.stages + turns + n); }
  __device__ Barrier& seen(int n) const { return barrier(1 + 2 * config.stages + 2 * turns + n); }

  __device__ void init_barriers() const {
    keys_full().init(1);
    for (int s = 0; s < config.stages; ++s) {
      full(s).init(1 + 32);  // the copies', and the lanes that copy numbers
      empty(s).init(4 * one_pass_warpgroups);
    }
    for (int n = 0; n < turns; ++n) turn(n).init(1), written(n).init(4 * one_pass_warpgroups), seen(n).init(1);
    publish_barriers();
  }

 private:
  __device__ UInt32 at(int offset) const { return shared_address(base) + offset; }
  __device__ UInt32* words(int first) const { return reinterpret_cast<UInt32*>(base + first); }
  __device__ float* numbers(int first, int stage) const {
    return reinterpret_cast<float*>(base + first) + stage * config.block_queries;
  }
  __device__ Barrier& barrier(int n) const { return reinterpret_cast<Barrier*>(base + layout.barriers)[n]; }
};

// Three warps beside the consumers.
template <OnePassConfig config>
struct OnePassServants {
  static constexpr OnePassLayout layout = layout_of(config);
  static constexpr int queries = config.block_queries;
  const OnePassParams& p;
  const OnePassShared<config>& shared;
  const OnePassWork<config>& w;
  const int lane = threadIdx.x % 32;

  __device__ void load_keys() const {
    Barrier& full = shared.keys_full();
    full.expect(one_pass_warpgroups * (layout.K_bytes + layout.V_bytes));
    for (int g = 0; g < one_pass_warpgroups; ++g) {
      const TilePlace place{w.key_begin + w.first + 64 * g, w.kv, w.tensor_b};
      load_tile<64, config.D / 64>(shared.K(g), p.k, full, place, pass_through_cache);
      load_tile<64, config.Dv / 64>(shared.V(g), p.v, full, place, pass_through_cache);
    }
  }

  __device__ void load_queries(Int32 head, Int32 tile, int stage) const {
    const TilePlace place{w.query_begin + tile * queries, head, w.tensor_b};
    Barrier& full = shared.full(stage);
    full.expect(layout.Q_bytes + layout.dO_bytes);
    load_tile<queries, config.D / 64>(shared.Q(stage), p.q, full, place, keep_in_cache);
    load_tile<queries, config.Dv / 64>(shared.dO(stage), p.d_o, full, place, keep_in_cache);
  }

  // LSE and delta of a tile of queries. Those beyond the sequence are as those that see nothing: they have P = 0.
  __device__ void load_numbers(Int32 head, Int32 tile, int stage) const {
    const Int64 at = head * p.call.row_head + w.b * p.call.row_batch + w.query_begin;
    bool blind = false;
    for (Int32 n = lane; n < queries; n += 32) {
      const Int32 i = tile * queries + n;
      const bool exists = i < w.queries;
      const float lse2 = exists ? p.call.lse2[at + i] : -minus_infinity<float>;
      shared.lse2(stage)[n] = lse2;
      shared.delta(stage)[n] = exists ? p.call.delta[at + i] : 0;
      blind |= lse2 == -minus_infinity<float>;
    }
    blind = __any_sync(0xffffffffu, blind);
    if (lane == 0) shared.blind(stage) = blind;
    shared.full(stage).arrive();
  }

  __device__ void load() const {
    if (w.no_tiles()) return;
    if (lane == 0) load_keys();
    RingPlace<config.stages> place;
    for (TileWalk<config> at{w}; at.has_more(); at.advance(), place.advance()) {
      shared.empty(place.stage).wait(place.parity ^ 1);
      if (lane == 0) load_queries(w.head + at.head, at.tile, place.stage);
      load_numbers(w.head + at.head, at.tile, place.stage);
    }
  }

  // One thread: a tile's turn has come when all blocks of earlier keys have added to it. Those have started before.
  __device__ void wait_for_turns() const {
    RingPlace<turns> place;
    for (TileWalk<config> at{w}; at.has_more(); at.advance(), place.advance()) {
      const UInt32 turn = w.turn_at(at.tile);
      shared.seen(place.stage).wait(place.parity ^ 1);
      wait_for_count(p.counts + at.number(p), turn);
      shared.is_first(place.stage) = turn == 0;
      shared.turn(place.stage).arrive();
    }
  }

  // One thread: what the consumers have added becomes visible to the block whose turn is next.
  __device__ void pass_turns_on() const {
    RingPlace<turns> place;
    for (TileWalk<config> at{w}; at.has_more(); at.advance(), place.advance()) {
      shared.written(place.stage).wait(place.parity);
      shared.seen(place.stage).arrive();
      count_one_more(p.counts + at.number(p));
    }
  }

  __device__ void serve() const {
    const int warp = threadIdx.x / 32;
    if (warp == 0) load();
    if (!config.ordered || w.no_tiles() || lane > 0) return;
    if (warp == 1) wait_for_turns();
    if (warp == 2) pass_turns_on();
  }
};

}  // namespace tessera::sm90
