// SPDX-License-Identifier: Apache-2.0
// Rings of pipeline stages in shared memory, between producers and consumers. Device code; included by all Hopper
// kernels. docs/gpu_kernels.md, "Hopper".
#pragma once

#include "sm90/ptx/barrier.cuh"

namespace tessera::sm90 {

// Where somebody is in a ring: the stage, and the phase parity of its barriers, which changes with every round.
template <int stages>
struct RingPlace {
  int stage = 0;
  UInt32 parity = 0;
  __device__ void advance() {
    if (++stage < stages) return;
    stage = 0, parity ^= 1;
  }
  __device__ RingPlace before() const {
    return stage > 0 ? RingPlace{stage - 1, parity} : RingPlace{stages - 1, parity ^ 1};
  }
};

// A consumer waits until what it is about to read has been written.
template <class Place>
__device__ inline void wait_full(const Barrier& full, const Place& place) {
  full.wait(place.parity);
}
// A producer waits until what it is about to overwrite is no longer read. Its parity is the opposite one: a new barrier
// counts as having ended the phase of parity 1, so that the first round does not wait.
template <class Place>
__device__ inline void wait_empty(const Barrier& empty, const Place& place) {
  empty.wait(place.parity ^ 1);
}

// A ring of tiles. Each stage has a `full` and an `empty` mbarrier; a consumer releases a stage by arriving at `empty`.
// Template parameters say where it lies in the kernel's shared memory, so that no register holds it.
template <int stages, int first_tile, int tile_bytes, int first_barrier>
struct Ring {
  unsigned char* const base;
  Barrier* const barriers;  // of the kernel: from first_barrier on come this ring's full ones, then its empty ones

  __device__ UInt32 tile(int stage) const { return shared_address(base) + first_tile + stage * tile_bytes; }
  __device__ Barrier& full(int stage) const { return barriers[first_barrier + stage]; }
  __device__ Barrier& empty(int stage) const { return barriers[first_barrier + stages + stage]; }

  template <class Place>
  __device__ void wait_full(const Place& place) const {
    sm90::wait_full(full(place.stage), place);
  }
  template <class Place>
  __device__ void wait_empty(const Place& place) const {
    sm90::wait_empty(empty(place.stage), place);
  }

  // How many arrivals end a phase: of producers at `full`, of consumers at `empty`.
  __device__ void init(int producers, int consumers) const {
    for (int s = 0; s < stages; ++s) full(s).init(producers), empty(s).init(consumers);
  }
};

}  // namespace tessera::sm90
