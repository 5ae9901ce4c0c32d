// SPDX-License-Identifier: Apache-2.0
// The shared memory of the Hopper kernels: rings of tiles, descriptions of work, and the barriers that say what is full
// and what is empty. Device code.
#pragma once

#include "sm90/kernel/work.cuh"
#include "sm90/tile/ring.cuh"

namespace tessera::sm90 {

template <Config config>
struct Shared {
  static constexpr Layout layout = layout_of(config);
  static constexpr int q_tiles = config.q_stages * config.warpgroups;
  static constexpr int tile_barriers = 2 * q_tiles + 4 * config.stages;  // those of work slots follow
  unsigned char* const base;

  __device__ UInt32 Q(int stage, int warpgroup) const {
    return tile(layout.Q, q_tile(stage, warpgroup), layout.q_bytes);
  }
  using KRing = Ring<config.stages, layout.K, layout.k_bytes, 2 * q_tiles>;
  using VRing = Ring<config.stages, layout.V, layout.v_bytes, 2 * q_tiles + 2 * config.stages>;
  __device__ KRing K() const { return {base, barriers()}; }
  __device__ VRing V() const { return {base, barriers()}; }
  __device__ UInt32 O(int warpgroup) const { return tile(layout.O, warpgroup, layout.o_bytes); }
  __device__ Work<config>& work(int slot) const {
    return *reinterpret_cast<Work<config>*>(base + layout.work + slot * work_bytes);
  }
  __device__ Listing& listing(int slot) const {
    return *reinterpret_cast<Listing*>(base + layout.listings + slot * listing_bytes);
  }
  __device__ int slot_of(const Work<config>& w) const {
    return int(reinterpret_cast<const unsigned char*>(&w) - base - layout.work) / work_bytes;
  }

  // full: what the slot holds is here. empty: it is no longer read.
  __device__ Barrier& q_full(int stage, int warpgroup) const { return barrier(q_tile(stage, warpgroup)); }
  __device__ Barrier& q_empty(int stage, int warpgroup) const { return barrier(q_tiles + q_tile(stage, warpgroup)); }
  __device__ Barrier& work_full(int slot) const { return barrier(tile_barriers + slot); }
  __device__ Barrier& work_empty(int slot) const { return barrier(tile_barriers + work_slots + slot); }

  // A warpgroup has its first S of the work in this slot, and the next one may ask the tensor cores for its own.
  __device__ Barrier& first_S(int slot, int warpgroup) const {
    return barrier(tile_barriers + (2 + warpgroup) * work_slots + slot);
  }

  __device__ void init_barriers() const {
    for (int n = 0; n < q_tiles; ++n) barrier(n).init(1), barrier(q_tiles + n).init(1);
    K().init(1, config.warpgroups), V().init(1, config.warpgroups);
    for (int s = 0; s < work_slots; ++s)
      work_full(s).init(1), work_empty(s).init(loaders_of(config) + config.warpgroups);
    for (int g = 0; g + 1 < config.warpgroups; ++g)
      for (int s = 0; s < work_slots; ++s) first_S(s, g).init(1);
    publish_barriers();
  }

 private:
  __device__ UInt32 tile(int first, int number, int bytes) const {
    return shared_address(base) + first + number * bytes;
  }
  __device__ static int q_tile(int stage, int warpgroup) { return stage * config.warpgroups + warpgroup; }
  __device__ Barrier* barriers() const { return reinterpret_cast<Barrier*>(base + layout.barriers); }
  __device__ Barrier& barrier(int n) const { return barriers()[n]; }
};

}  // namespace tessera::sm90
