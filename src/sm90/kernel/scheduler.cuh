// SPDX-License-Identifier: Apache-2.0
// The scheduler of the Hopper forward kernel: one thread, which describes the block's tiles of queries ahead of time,
// for the producer and the consumers alike. Device code.
#pragma once

#include "sm90/kernel/shared.cuh"

namespace tessera::sm90 {

template <Config config>
__device__ void schedule(const Params<config>& p, const Shared<config>& shared) {
  for (Int32 round = 0;; ++round) {
    if (round == 1) wait_for_kernel_before();  // it sets p.taken to 0
    const int slot = round % work_slots;
    shared.work_empty(slot).wait(UInt32(round / work_slots % 2) ^ 1);
    describe_work(p, number_in_round(p, round), shared.work(slot), shared.listing(slot));
    shared.work_full(slot).arrive();
    if (shared.work(slot).none()) return;
  }
}

}  // namespace tessera::sm90
