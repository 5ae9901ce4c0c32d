// SPDX-License-Identifier: Apache-2.0
// The `mma` forward kernel: a block has a tile of queries, its warps 16 or 32 rows each; tiles of K and V come by
// cp.async, one or two stages ahead. Products by mma.sync from fragments that ldmatrix loads; P stays in registers,
// where S was. Device code; implements docs/algorithm.md, "Online softmax".
#pragma once

#include "gpu/kernel/accumulator.cuh"
#include "gpu/kernel/scores.cuh"
#include "mma/kernel/work.cuh"
#include "mma/tile/copy.cuh"
#include "mma/tile/product.cuh"
#include "mma/tile/softmax.cuh"

namespace tessera::mma {

template <Config config>
struct Forward {
  static constexpr int R = config.row_tiles, keys = config.block_keys;
  static constexpr Layout layout = layout_of(config);
  using State = Rows<config>;

  const Params<config>& p;
  const Work& w;
  const Listing& listing;  // of keys in pages
  const Share& share;      // of this warp
  const UInt32 memory;     // of the block
  const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 * 16 * R;
  // Where this lane's rows begin, for ldmatrix.
  const UInt32 q_lane = memory + layout.Q + first_row * gpu::panel_row_bytes + lane_byte(a_row(lane), a_column(lane));
  const UInt32 k_lane = memory + layout.K + lane_byte(b_row(lane), b_column(lane));
  const UInt32 v_lane = memory + layout.V + lane_byte(t_row(lane), t_column(lane));
  UInt32 Q[config.q_registers ? R : 1][config.q_registers ? config.D / 16 : 1][4];
  float O[R][config.Dv / 2] = {};
  State rows[R];
  Int32 k_page, v_page;  // keys in pages: of a row of the tiles that are copied next; below 0: none

  __device__ Forward(const Params<config>& p, const Work& w, const Listing& listing, const Share& share,
                     UInt32 memory) :
      p(p),
      w(w), listing(listing), share(share), memory(memory) {
    const float sink = p.call.x.sinks ? p.call.x.sinks[w.h * p.call.x.sink_head] : minus_infinity<float>;
    if (sink != minus_infinity<float>)
#pragma unroll
      for (int r = 0; r < R; ++r) rows[r].begin_with_sink(sink, lane % 4 == 0);
  }

  __device__ int row(int r, int n) const { return first_row + 16 * r + gpu::accumulator_row(lane, n); }

  // --- copies

  template <int width, Element type>
  using Copy =
      typename Chosen<config.paged, ScatteredCopy<config, keys, width, type>, TileCopy<config, keys, width>>::Type;
  using CopyK = Copy<config.D, config.k>;
  using CopyV = Copy<config.Dv, config.v>;

  __device__ void copy_Q() const {
    const auto* from = gpu::row_of<config.element>(p.call.x.q, w.b, w.q_begin + w.first, w.h);
    TileCopy<config, rows_of(config), config.D>(memory + layout.Q, &from->bits, p.call.x.q.token, w.queries - w.first,
                                                p.D)
        .issue_all();
  }
  // Of tile n; without rows where there is none, which then become 0.
  __device__ CopyK copy_of_K(Int32 n, int stage) const {
    const UInt32 to = memory + layout.K + stage * layout.k_bytes;
    if constexpr (config.paged) {
      return {to, p.call.x.k.data, place_of(p.call.x.k, k_page, n), p.D};
    } else {
      const auto* from = gpu::row_of<config.element>(p.call.x.k, w.b, w.k_begin + Int64(n) * keys, w.kv);
      return {to, &from->bits, p.call.x.k.token, w.keys - n * keys, p.D};
    }
  }
  __device__ CopyV copy_of_V(Int32 n, int stage) const {
    const UInt32 to = memory + layout.V + stage * layout.v_bytes;
    if constexpr (config.paged) {
      return {to, p.call.x.v.data, place_of(p.call.x.v, v_page, n), p.Dv};
    } else {
      const auto* from = gpu::row_of<config.element>(p.call.x.v, w.b, w.k_begin + Int64(n) * keys, w.kv);
      return {to, &from->bits, p.call.x.v.token, w.keys - n * keys, p.Dv};
    }
  }
  __device__ void copy_K(Int32 n, int stage) const { copy_of_K(n, stage).issue_all(); }
  __device__ void copy_V(Int32 n, int stage) const { copy_of_V(n, stage).issue_all(); }

  // Keys in pages. A tile's pages are looked up long before it is copied: their entries take time to arrive.
  __device__ static Int32 known_key(Int32 n) { return n * keys + CopyK::known_row(recomputed(threadIdx.x)); }
  __device__ Int32 page_of(const gpu::PageTable& table, Int64 entry, Int32 n) const {
    const Int32 key = known_key(n);
    if (key >= (n + 1) * keys || key < listing.begin || key >= listing.end) return -1;
    return gpu::page_of(p.pages, table, entry, UInt32(listing.leftpad + key));
  }
  __device__ Int64 place_of(const gpu::TokenRef& t, Int32 page, Int32 n) const {
    const UInt32 place = gpu::place_in_page(p.pages, UInt32(listing.leftpad + known_key(n)));
    return page < 0 ? CopyK::nowhere : page * t.batch + place * t.token + w.kv * t.head;
  }
  __device__ void find_K(Int32 n) {
    if constexpr (config.paged) k_page = page_of(p.pages.k, listing.k_entry, n);
  }
  __device__ void find_V(Int32 n) {
    if constexpr (config.paged) v_page = page_of(p.pages.v, listing.v_entry, n);
  }

  // The next tiles of K and V, some parts between the products of one step of S and those of the next.
  struct Prefetch {
    CopyK k;
    CopyV v;
    __device__ void issue(int step) {
      constexpr int steps = config.D / 16, parts = CopyK::parts + CopyV::parts;
#pragma unroll
      for (int part = step * parts / steps; part < (step + 1) * parts / steps; ++part)
        if (part < CopyK::parts)
          k.issue(part);
        else
          v.issue(part - CopyK::parts);
    }
    __device__ void issue_all() { k.issue_all(), v.issue_all(); }
  };
  struct NoPrefetch {
    __device__ void issue(int) {}
  };

  // --- products

  __device__ void load_Q(UInt32 (&a)[4], int r, int k) const {
    load_matrices<false>(a, turned(q_lane, column_turn(k)) + panel_step(rows_of(config), k) + r * bytes_of_16_rows);
  }
  __device__ void keep_Q() {
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int k = 0; k < config.D / 16; ++k) load_Q(Q[r][k], r, k);
  }

  // S = Q K^T.
  template <class Aside>
  __device__ void multiply_QK(float (&S)[R][keys / 2], int stage, Aside aside) const {
    constexpr int steps = config.D / 16;
    if constexpr (config.halves_S) {
      float rest[R][keys / 2];
      multiply_QK<0, steps / 2>(S, stage, aside);
      multiply_QK<steps / 2, steps>(rest, stage, aside);
#pragma unroll
      for (int r = 0; r < R; ++r)
#pragma unroll
        for (int n = 0; n < keys / 2; ++n) S[r][n] += rest[r][n];
    } else {
      multiply_QK<0, steps>(S, stage, aside);
    }
    if constexpr (config.scaled) {
#pragma unroll
      for (int r = 0; r < R; ++r)
#pragma unroll
        for (int n = 0; n < keys / 2; ++n) S[r][n] *= listing.k_scale;
    }
  }
  template <int first, int end, class Aside>
  __device__ void multiply_QK(float (&S)[R][keys / 2], int stage, Aside& aside) const {
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int n = 0; n < keys / 2; ++n) S[r][n] = 0;
    const UInt32 k_stage = k_lane + stage * layout.k_bytes;
#pragma unroll
    for (int k = first; k < end; ++k) {
      UInt32 a[R][4];
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if constexpr (config.q_registers) {
#pragma unroll
          for (int e = 0; e < 4; ++e) a[r][e] = Q[r][k][e];
        } else {
          load_Q(a[r], r, k);
        }
      }
      const UInt32 k_columns = turned(k_stage, column_turn(k)) + panel_step(keys, k);
#pragma unroll
      for (int j = 0; j < keys / 16; ++j) {
        UInt32 b[4];
        load_matrices<false>(b, k_columns + j * bytes_of_16_rows);
#pragma unroll
        for (int r = 0; r < R; ++r) {
          multiply<config.element, config.turing>(&S[r][8 * j], a[r], b[0], b[1]);
          multiply<config.element, config.turing>(&S[r][8 * j + 4], a[r], b[2], b[3]);
        }
      }
      aside.issue(k);
    }
  }

  // O += P V.
  __device__ void multiply_PV(const typename State::Probabilities (&P)[R], int stage) {
    const UInt32 v_stage = v_lane + stage * layout.v_bytes;
#pragma unroll
    for (int j = 0; j < keys / 16; ++j)
#pragma unroll
      for (int c = 0; c < config.Dv / 16; ++c) {
        UInt32 b[4];
        load_matrices<true>(b, turned(v_stage, column_turn(c)) + panel_step(keys, c) + j * bytes_of_16_rows);
#pragma unroll
        for (int r = 0; r < R; ++r) {
          multiply<config.element, config.turing>(&O[r][8 * c], P[r][j], b[0], b[1]);
          multiply<config.element, config.turing>(&O[r][8 * c + 4], P[r][j], b[2], b[3]);
        }
      }
  }

  // --- scores and softmax

  __device__ void hide_outside_band(float (&S)[R][keys / 2], Int32 n) const {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const Int32 distance = first_row + 16 * r - n * keys;
      gpu::hide<keys>(S[r], lane, w.low + distance, w.high + distance, w.keys - n * keys);
    }
  }

  __device__ gpu::DeviceSequence sequence() const { return {0, 0, w.queries, w.keys, w.shift, {}}; }
  __device__ gpu::ScoreTile tile_of(const gpu::DeviceSequence& s, Int32 n) const {
    return {s, w.first, rows_of(config), Int64(n) * keys, keys};
  }

  // With the tile's maximum, in the rows to be raised; O follows.
  template <class Keep>
  __device__ void online(const float (&S)[R][keys / 2], float factor, UInt32 raised,
                         typename State::Probabilities (&P)[R], Keep keep) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float alpha[2];
      rows[r].online(S[r], factor, raised >> 2 * r, alpha, P[r], [&](int n) { return keep(r, n); });
      if (!__any_sync(0xffffffffu, alpha[0] != 1 || alpha[1] != 1)) continue;
#pragma unroll
      for (int n = 0; n < config.Dv / 2; ++n) O[r][n] *= alpha[n / 2 % 2];
    }
  }

  // P of a tile. The steady state looks for no maximum; where a sum shows that it must, S, which P has replaced, is
  // multiplied once more: K is still there.
  template <class Aside>
  __device__ void softmax(Int32 n, int stage, bool first, bool cut, Aside aside,
                          typename State::Probabilities (&P)[R]) {
    float S[R][keys / 2];
    // Bit 2 r + i: row i of tile r is to be raised. One more bit is the warp's: this time with a maximum.
    constexpr UInt32 with_maximum = 1 << 2 * R;
    UInt32 raised = first ? 2 * with_maximum - 1 : 0;
    for (;;) {
      multiply_QK(S, stage, aside);  // once more: the same bytes are copied to the same place
      if (cut) hide_outside_band(S, n);
      if (raised & with_maximum) return online(S, p.factor, raised, P, [](int, int) { return 1.f; });
      float sums[R][2];
      bool exceeded = false;
#pragma unroll
      for (int r = 0; r < R; ++r) {
        rows[r].exponentials(S[r], p.factor, sums[r], P[r], [](int) { return 1.f; });
        exceeded = exceeded || rows[r].exceeded(sums[r]);
      }
      if (!__any_sync(0xffffffffu, exceeded)) {
#pragma unroll
        for (int r = 0; r < R; ++r) rows[r].add(sums[r]);
        return;
      }
      raised = with_maximum;
#pragma unroll
      for (int r = 0; r < R; ++r) raised |= rows[r].find_exceeded(sums[r]) << 2 * r;
    }
  }

  // The same with options, which are asked for every score.
  __device__ void softmax_one_by_one(Int32 n, int stage, bool cut, typename State::Probabilities (&P)[R]) {
    float S[R][keys / 2];
    multiply_QK(S, stage, NoPrefetch{});
    const gpu::DeviceSequence s = sequence();
    const gpu::ScoreOf<config.options> score(p.call.x, s, w.b, w.h);
    const gpu::ScoreTile tile = tile_of(s, n);
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int e = 0; e < keys / 2; ++e) S[r][e] = score(S[r][e], tile, row(r, e), gpu::accumulator_column(lane, e));
    if (cut) hide_outside_band(S, n);
    // The factor of the keys that dropout keeps comes last, in f32: times that, a P of 1 would be rounded.
    online(S, 1, ~0u, P, [&](int r, int e) {
      return score.keep(tile, row(r, e), gpu::accumulator_column(lane, e)) == 0 ? 0.f : 1.f;
    });
  }

  // --- the loop over tiles of keys

  __device__ void attend() {
    const Int32 begin = w.begin, end = w.end;
    find_K(begin), find_V(begin);
    copy_Q();
    if constexpr (config.q_registers) commit_copies();
    copy_K(begin, 0);
    if constexpr (config.stages == 2) copy_V(begin, 0);
    commit_copies();
    if constexpr (config.stages == 2) find_K(begin + 1), find_V(begin + 1);
    if constexpr (config.q_registers) {
      wait_copies<1>();
      __syncthreads();
      keep_Q();
    }
    int stage = 0;
#pragma unroll 1
    for (Int32 n = begin; n < end; ++n) {
      wait_copies<0>();
      __syncthreads();  // this tile has arrived, and all warps are done with the one before
      const bool sees = share.sees(n);
      typename State::Probabilities P[R];
      if constexpr (config.spreads_copies) {
        Prefetch next{copy_of_K(n + 1, 1 - stage), copy_of_V(n + 1, 1 - stage)};
        if (sees)
          softmax(n, stage, n == share.begin, share.cuts(n), next, P);
        else
          next.issue_all();
        commit_copies();
      } else {
        if constexpr (config.stages == 2) {
          if (n + 1 < end) copy_K(n + 1, 1 - stage), copy_V(n + 1, 1 - stage);
        } else {
          copy_V(n, 0);
          find_K(n + 1);
        }
        commit_copies();
        if (sees) {
          if constexpr (config.general)
            softmax_one_by_one(n, stage, share.cuts(n), P);
          else
            softmax(n, stage, n == share.begin, share.cuts(n), NoPrefetch{}, P);
        }
      }
      if constexpr (config.stages == 1) {
        wait_copies<0>();
        __syncthreads();  // V has arrived, and all warps are done with K
        if (n + 1 < end) copy_K(n + 1, 0);
        commit_copies();
      }
      // Entries arrive during the product.
      if constexpr (config.stages == 2) find_K(n + 2);
      find_V(n + config.stages);
      if (sees) multiply_PV(P, stage);
      if constexpr (config.stages == 2) stage ^= 1;
    }
  }

  // O / l and LSE. Queries that see no key: O = 0, LSE = -inf, or the sink.
  __device__ void write() {
    float whole = config.options.dropout ? p.call.x.keep_scale : 1;
    if constexpr (config.scaled) whole *= listing.v_scale;
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float sum = gpu::quad_sum(rows[r].l[e]), factor = sum == 0 ? 0 : whole / sum;
        const Int32 i = w.first + row(r, 2 * e);
        const bool exists = i < w.queries;
#pragma unroll
        for (int n = 2 * e; n < config.Dv / 2; n += 4) O[r][n] *= factor, O[r][n + 1] *= factor;
        gpu::store_row<config.o, config.Dv>(O[r], e, lane, gpu::row_of<config.o>(p.call.o, w.b, w.q_begin + i, w.h),
                                            p.Dv, exists);
        if (lane % 4 == 0 && exists && p.call.lse.data)
          *gpu::number_of(p.call.lse, w.b, w.q_begin + i, w.h) = gpu::natural_lse_by_mantissa(rows[r].m(e), sum);
      }
  }
};

template <Config config>
__device__ void forward(const Params<config>& p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& work = *reinterpret_cast<Work*>(memory + layout_of(config).work);
  auto& listing = *reinterpret_cast<Listing*>(memory + layout_of(config).listing);
  auto* shares = reinterpret_cast<Share*>(memory + layout_of(config).shares);
  if (threadIdx.x == 0) describe_work<config>(p, Int32(blockIdx.x), work, listing);
  __syncthreads();
  if (work.first >= work.queries) return;
  if (threadIdx.x < config.warps) describe_share<config>(work, threadIdx.x, shares[threadIdx.x]);
  __syncthreads();
  Forward<config> kernel(p, work, listing, shares[threadIdx.x / 32], shared_address(memory));
  if (work.begin < work.end) kernel.attend();
  kernel.write();
}

}  // namespace tessera::mma
