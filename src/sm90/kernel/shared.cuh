// The shared memory of the Hopper kernels: rings of tiles, descriptions of work, and the barriers that say what is full
// and what is empty. Device text.
#pragma once

#include "sm90/kernel/work.cuh"
#include "sm90/ptx/barrier.cuh"

namespace tessera::sm90 {

template <Config config>
struct Shared {
  static constexpr Layout layout = layout_of(config);
  static constexpr int q_tiles = config.q_stages * config.warpgroups;
  unsigned char* const base;

  __device__ UInt32 Q(int stage, int warpgroup) const {
    return tile(layout.Q, q_tile(stage, warpgroup), layout.q_bytes);
  }
  __device__ UInt32 K(int stage) const { return tile(layout.K, stage, layout.k_bytes); }
  __device__ UInt32 V(int stage) const { return tile(layout.V, stage, layout.v_bytes); }
  __device__ UInt32 O(int warpgroup) const { return tile(layout.O, warpgroup, layout.o_bytes); }
  __device__ Work<config>& work(int slot) const {
    return *reinterpret_cast<Work<config>*>(base + layout.work + slot * work_bytes);
  }
  __device__ int slot_of(const Work<config>& w) const {
    return int(reinterpret_cast<const unsigned char*>(&w) - base - layout.work) / work_bytes;
  }

  // full: what the slot holds is here. empty: it is no longer read.
  __device__ Barrier& q_full(int stage, int warpgroup) const { return barrier(q_tile(stage, warpgroup)); }
  __device__ Barrier& q_empty(int stage, int warpgroup) const { return barrier(q_tiles + q_tile(stage, warpgroup)); }
  __device__ Barrier& k_full(int stage) const { return barrier(2 * q_tiles + stage); }
  __device__ Barrier& k_empty(int stage) const { return barrier(2 * q_tiles + config.stages + stage); }
  __device__ Barrier& v_full(int stage) const { return barrier(2 * q_tiles + 2 * config.stages + stage); }
  __device__ Barrier& v_empty(int stage) const { return barrier(2 * q_tiles + 3 * config.stages + stage); }
  __device__ Barrier& work_full(int slot) const { return barrier(2 * q_tiles + 4 * config.stages + slot); }
  __device__ Barrier& work_empty(int slot) const {
    return barrier(2 * q_tiles + 4 * config.stages + work_slots + slot);
  }

  __device__ void init_barriers() const {
    for (int n = 0; n < q_tiles; ++n) barrier(n).init(1), barrier(q_tiles + n).init(1);
    for (int s = 0; s < config.stages; ++s) {
      k_full(s).init(1), k_empty(s).init(config.warpgroups);
      v_full(s).init(1), v_empty(s).init(config.warpgroups);
    }
    for (int s = 0; s < work_slots; ++s) work_full(s).init(1), work_empty(s).init(1 + config.warpgroups);
    publish_barriers();
  }

 private:
  __device__ UInt32 tile(int first, int number, int bytes) const {
    return shared_address(base) + first + number * bytes;
  }
  __device__ static int q_tile(int stage, int warpgroup) { return stage * config.warpgroups + warpgroup; }
  __device__ Barrier& barrier(int n) const { return reinterpret_cast<Barrier*>(base + layout.barriers)[n]; }
};

}  // namespace tessera::sm90
