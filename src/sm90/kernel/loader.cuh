// SPDX-License-Identifier: Apache-2.0
// The producer of the Hopper forward kernel: one thread, which copies tiles of Q, K and V into their rings by TMA.
// Device code.
#pragma once

#include "sm90/kernel/shared.cuh"
#include "sm90/ptx/tma.cuh"

namespace tessera::sm90 {

// The loader. In the order in which the consumers ask: V of a tile of keys comes after K of the next one, be it for
// these queries or for the next.
template <Config config>
struct Loader {
  static constexpr Layout layout = layout_of(config);
  const ForwardParams& p;
  const Shared<config>& shared;
  RingPlace<work_slots> slot;
  RingPlace<config.q_stages> q;
  RingPlace<config.stages> k, v;
  TilePlace owed_V{-1, 0, 0};

  __device__ Loader(const ForwardParams& p, const Shared<config>& shared) : p(p), shared(shared) {}

  __device__ void load_Q(const Work<config>& w) {
    for (int g = 0; g < config.warpgroups; ++g) {
      wait_empty(shared.q_empty(q.stage, g), q);
      shared.q_full(q.stage, g).expect(layout.q_bytes);
      load_tile<64, config.D / 64>(shared.Q(q.stage, g), p.q, shared.q_full(q.stage, g), w.queries_at(g),
                                   pass_through_cache);
    }
    q.advance();
  }
  __device__ void load_K(const TilePlace& at) {
    shared.K().wait_empty(k);
    shared.K().full(k.stage).expect(layout.k_bytes);
    load_tile<config.block_keys, config.D / 64>(shared.K().tile(k.stage), p.k, shared.K().full(k.stage), at,
                                                keep_in_cache);
    k.advance();
  }
  __device__ void load_owed_V() {
    if (owed_V.token < 0) return;
    shared.V().wait_empty(v);
    shared.V().full(v.stage).expect(layout.v_bytes);
    load_tile<config.block_keys, config.Dv / 64>(shared.V().tile(v.stage), p.v, shared.V().full(v.stage), owed_V,
                                                 keep_in_cache);
    v.advance();
    owed_V.token = -1;
  }

  __device__ void load() {
    for (bool more = true; more; slot.advance()) {
      wait_full(shared.work_full(slot.stage), slot);
      const Work<config>& w = shared.work(slot.stage);
      for (Int32 n = w.begin; n < w.end; ++n) {
        const bool first = n == w.begin;
        if (first && config.q_stages > 1) load_Q(w);
        load_K(w.keys_at(n));
        load_owed_V();
        owed_V = w.keys_at(n);
        if (first && config.q_stages == 1) load_Q(w);  // its place is free only late
      }
      if (w.empty()) load_owed_V();
      more = !w.none();
      shared.work_empty(slot.stage).arrive();
    }
  }
};

}  // namespace tessera::sm90
