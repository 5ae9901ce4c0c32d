// SPDX-License-Identifier: Apache-2.0
// The epilogue of the Hopper forward kernel: a warpgroup normalises O of its 64 queries and writes it, with LSE, to
// memory. Device code; included by forward.cuh. docs/algorithm.md, "Online softmax".
#pragma once

#include "gpu/kernel/state.cuh"
#include "sm90/kernel/shared.cuh"
#include "sm90/tile/accumulator.cuh"
#include "sm90/tile/softmax.cuh"

namespace tessera::sm90 {

// Of a kernel whose rows are carried: its parameters have them.
__device__ inline const gpu::States& states_of(const ForwardParams& p) {
  return static_cast<const CarriedParams&>(p).states;
}

template <Config config>
struct Epilogue {
  using Output = float[config.Dv / 2];

  const ForwardParams& p;
  const Shared<config>& shared;
  const int warpgroup, thread = threadIdx.x % 128;
  const bool leads = thread == 0;

  __device__ Epilogue(const ForwardParams& p, const Shared<config>& shared, int warpgroup) :
      p(p), shared(shared), warpgroup(warpgroup) {}

  __device__ void sync_warpgroup() const { sync_threads(1 + warpgroup, 128); }

  // O / l and LSE.
  __device__ void write(Output& O, const Rows<config>& rows, const Work<config>& w) const {
    if constexpr (config.carried) {
      if (states_of(p).out.o.data) return store_state(O, rows, w);
    }
    const float sum[2] = {rows.sum(0), rows.sum(1)}, whole = whole_of();
    scale_rows(O, gpu::finish_factor(whole, sum[0]), gpu::finish_factor(whole, sum[1]));
    // Of the four lanes that share two rows, two write an LSE each.
    const int r = thread % 4;
    const Int32 i = w.query(warpgroup, accumulator_row(thread, 2 * r));
    if (r < 2 && p.call.lse.data && i < w.queries)
      *gpu::number_of(p.call.lse, w.b, w.q_begin + i, w.h) =
          gpu::natural_lse_by_mantissa(r == 0 ? rows.m(0) : rows.m(1), r == 0 ? sum[0] : sum[1]);
    if constexpr (config.stages_O) {
      copy_O(O, w);
    } else {
      store_O(O, w);
      sync_warpgroup();
    }
  }

  // Queries that see no key: O = 0, LSE = -inf, or the sink.
  __device__ void write_nothing(const Work<config>& w) const {
    for (int row = thread / 32; row < 64; row += 4) {
      const Int32 i = w.query(warpgroup, row);
      if (i >= w.queries) return;
      if constexpr (config.carried) {
        gpu::pass_state<config.o>(p.call, states_of(p), whole_of(), w.b, w.q_begin + i, w.h, p.Dv);
        continue;
      }
      auto* o = gpu::row_of<config.o>(p.call.o, w.b, w.q_begin + i, w.h);
      for (int d = thread % 32; d < p.Dv; d += 32) o[d] = {};
      if (thread % 32 == 0 && p.call.lse.data)
        *gpu::number_of(p.call.lse, w.b, w.q_begin + i, w.h) =
            p.call.x.sinks ? p.call.x.sinks[w.h * p.call.x.sink_head] : minus_infinity<float>;
    }
  }

 private:
  __device__ float whole_of() const { return config.options.dropout ? p.call.x.keep_scale : 1; }

  // By way of shared memory and a TMA store.
  __device__ void copy_O(const Output& O, const Work<config>& w) const {
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
  __device__ void copy_rows(UInt32 tile, const Work<config>& w, Int32 valid) const {
    for (int row = thread / 32; row < 64 && row < valid; row += 4) {
      auto* o = gpu::row_of<config.element>(p.call.o, w.b, w.q_begin + w.query(warpgroup, row), w.h);
      for (int d = thread % 32; d < p.Dv; d += 32) o[d] = {load_element(tile + tile_byte(64, row, d))};
    }
  }

  // Straight from registers.
  __device__ void store_O(const Output& O, const Work<config>& w) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Int32 i = w.query(warpgroup, accumulator_row(thread, 2 * r));
      auto* o = gpu::row_of<config.o>(p.call.o, w.b, w.q_begin + i, w.h);
      sm90::store_row<config.o, config.Dv>(O, r, thread, o, p.Dv, i < w.queries);
    }
  }

  // Instead of O and LSE: o as it is, m and l. Of the four lanes that share two rows, two write these.
  __device__ void store_state(const Output& O, const Rows<config>& rows, const Work<config>& w) const {
    const gpu::StateRef& out = states_of(p).out;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Int32 i = w.query(warpgroup, accumulator_row(thread, 2 * r));
      const Int64 row = w.q_begin + i;
      sm90::store_row<Element::f32, config.Dv>(O, r, thread, gpu::row_of<Element::f32>(out.o, w.b, row, w.h), p.Dv,
                                               i < w.queries);
      if (thread % 4 == r && i < w.queries) gpu::write_state(out, w.b, row, w.h, {rows.m(r), double(rows.sum(r))});
    }
    sync_warpgroup();
  }
};

}  // namespace tessera::sm90
