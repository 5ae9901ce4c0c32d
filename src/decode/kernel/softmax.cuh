// SPDX-License-Identifier: Apache-2.0
// Scores and the online softmax of the column engine: what becomes of a tile's products until P lies in shared memory
// and the state is relative to the new maxima. Device code; implements docs/algorithm.md, "Online softmax".
#pragma once

#include "decode/kernel/products.cuh"
#include "gpu/kernel/scores.cuh"

namespace tessera::decode {

template <Config config>
struct Softmax : Products<config> {
  using Base = Products<config>;
  using Base::layout, Base::R, Base::T, Base::p, Base::w, Base::lane, Base::warp, Base::columns, Base::values;
  using typename Base::Scores;
  static constexpr int key_warps = config.key_warps(), part_warps = key_warps / config.parts;
  using ColumnNumbers = float[columns][2];

  State<config> state{};
  // With scales, P times the scale of a value is relative to a maximum of its own, of each group of dims: what V's
  // products are small or large by must not be lost in 16 bits. A state's O is relative to m, from the end of its leaf
  // on.
  static constexpr int groups = config.v_groups;
  ColumnNumbers v_top[groups];

  // What a new maximum multiplies sums by. Those of a tile's second part wait until the first part's values have been
  // added.
  static_assert(config.parts == 1 || (config.parts == 2 && part_warps == sum_warps));
  struct Change {
    bool any;
    ColumnNumbers alpha;
  };
  struct Later {
    Change l, O[config.scaled ? groups : 1];
  };
  Later later;

  using Base::Base;
  template <class Thing>
  __device__ Thing* shared(int offset) const {
    return Base::template shared<Thing>(offset);
  }

  // --- step 1, S^T = K Q^T: decode/kernel/products.cuh; then scores

  // What the rule of scores asks about one element.
  struct Pair {
    Int32 key;
    Int64 origin;
    __device__ float distance() const { return float(key - origin); }
    __device__ float bias() const { return 0; }
  };
  // Of a key inside of the tile's range.
  __device__ bool sees(const Column& of, Int32 key) const {
    if (key < of.begin) return false;
    if constexpr (config.draft) {
      if (p.draft.tree && key >= w.group.tree_begin) {
        const Int32 t = key - w.group.tree_begin;
        return key < of.tree_end && t < p.draft.tree_bits &&
               (UInt32(p.draft.tree[of.tree + t / 32 * p.draft.tree_word]) >> t % 32 & 1u);
      }
    }
    return key < of.end;
  }
  // Products become scores in units of log2(e); -inf where a row does not see the key.
  __device__ void score(Scores& S, Int32 tile) const {
    constexpr ScoreOptions options = config.options.options();
    const Int32 first = tile * T + 16 * warp + lane / 4;
    const bool cut = tile * T < w.group.rows.whole.begin || tile * T + T > w.group.rows.whole.end;
#pragma unroll
    for (int c = 0; c < columns; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const Column& of = shared<const Column>(layout.columns)[State<config>::column(c, e)];
        const ScoreNumbers<float> numbers =
            score_numbers(options, p.call.x.score_scale, p.call.x.parameters, of.slope, log2e<float>);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Pair pair{first + 8 * half, of.origin};
          float& x = S[c][2 * half + e];
          if constexpr (config.q != config.element) x *= of.factor;
          x = ScoreRule<gpu::ScoreMath>::score(options, numbers, x * numbers.factor, pair);
          if (cut && !sees(of, pair.key)) x = minus_infinity<float>;
        }
      }
  }

  // --- step 2: online softmax of the columns

  // A value's scale as 2^exponent times a factor from 1 to 2, or its negative: of a scale of 1 nothing remains. 0 has
  // an exponent that raises nothing.
  struct ValueScale {
    float exponent[2] = {0, 0}, factor[2] = {1, 1};  // of the lane's two keys
  };
  __device__ ValueScale value_scales(int stage, int group) const {
    ValueScale out;
    if constexpr (config.scaled) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int exponent;
        out.factor[half] = 2 * frexpf(this->scale_of(stage, 1, group, half), &exponent);
        out.exponent[half] = out.factor[half] == 0 ? minus_infinity<float> : float(exponent - 1);
      }
    }
    return out;
  }

  // The largest score of each column of the tile, plus something of each key, for all warps.
  __device__ void share_maxima(const Scores& S, const float (&added)[2], int place) const {
#pragma unroll
    for (int c = 0; c < columns; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float top = fmaxf(S[c][e] + added[0], S[c][2 + e] + added[1]);
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2)
          top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, distance));
        if (lane < 4) shared<float>(layout.maxima)[place + warp * R + State<config>::column(c, e)] = top;
      }
  }
  static constexpr int value_maxima(int group) { return (1 + group) * key_warps * R; }  // behind those of scores
  // A maximum by that of a part of the tile: what exponents are relative to, and what sums must be multiplied by.
  __device__ void raise(ColumnNumbers& top, int place, int part, ColumnNumbers& base, Change& change) const {
    bool changes = false;
#pragma unroll
    for (int c = 0; c < columns; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float before = top[c][e];
#pragma unroll
        for (int n = part * part_warps; n < (part + 1) * part_warps; ++n)
          top[c][e] = fmaxf(top[c][e], shared<const float>(layout.maxima)[place + n * R + State<config>::column(c, e)]);
        base[c][e] = exponent_base(top[c][e]);
        change.alpha[c][e] = gpu::exp2_of(before - base[c][e]);
        changes = changes || change.alpha[c][e] != 1;
      }
    change.any = __any_sync(0xffffffffu, changes);
  }
  // P of a warp's 16 keys, in 16 bits, a row for each key; l of what it was before it was rounded. With scales, what is
  // stored is P times the value's scale, relative to v_base: once for each group of dims.
  __device__ void store_P(const Scores& S, const ColumnNumbers& base, const ColumnNumbers& alpha,
                          const ColumnNumbers (&v_base)[groups], const ValueScale (&scale)[groups]) {
    const bool sums_here = config.parts == 1 || warp < part_warps;
    const int key = 16 * warp + lane / 4;
    const UInt32 p_lane = this->address(layout.P) + p_byte(R, key, lane % 4 * 2);
#pragma unroll
    for (int c = 0; c < columns; ++c) {
      float P[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) P[e] = gpu::exp2_of(S[c][e] - base[c][e % 2]);
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (sums_here)
          state.l[c][e] = fmaf(state.l[c][e], alpha[c][e], P[e] + P[2 + e]);
        else
          later_sum(c, e, warp - part_warps) = P[e] + P[2 + e];
#pragma unroll
      for (int g = 0; g < groups; ++g)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if constexpr (config.scaled) {
#pragma unroll
            for (int e = 0; e < 2; ++e)
              P[2 * half + e] =
                  gpu::exp2_of(S[c][2 * half + e] + scale[g].exponent[half] - v_base[g][c][e]) * scale[g].factor[half];
          }
          gpu::store_pair(gpu::turned(p_lane, p_turn(c)) + (g * T + half * 8) * R * 2,
                          gpu::packed<config.element>(P[2 * half], P[2 * half + 1]));
        }
    }
  }

  // The scores of a tile whose keys have arrived, and their maxima for all warps.
  struct Tile {
    Scores S;
    ValueScale scale[groups];
  };
  __device__ void score_tile(Tile& x, Int32 tile) {
    if (warp >= key_warps) return;
    score(x.S, tile);
    share_maxima(x.S, {0, 0}, 0);
    if constexpr (config.scaled) {
#pragma unroll
      for (int g = 0; g < groups; ++g) {
        x.scale[g] = value_scales(tile % config.stages, g);
        share_maxima(x.S, x.scale[g].exponent, value_maxima(g));
      }
    }
  }
  // Behind a barrier: the state's O and l are relative to the first part's new maxima, what the second part's change is
  // known, and P of the tile is there for all warps behind the next barrier.
  __device__ void weigh_tile(const Tile& x) {
    ColumnNumbers base, v_base[groups];
    Change first;
    const bool in_later_part = config.parts == 2 && warp >= part_warps;
    const auto raise_all = [&](ColumnNumbers& top, int place, ColumnNumbers& own_base, Change& now, Change& after) {
      raise(top, place, 0, own_base, now);
      if constexpr (config.parts == 2) {
        ColumnNumbers later_base;
        raise(top, place, 1, later_base, after);
#pragma unroll
        for (int c = 0; c < columns; ++c)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (in_later_part) own_base[c][e] = later_base[c][e];
      }
    };
    raise_all(state.m, 0, base, first, later.l);
    if constexpr (config.scaled) {
#pragma unroll
      for (int g = 0; g < groups; ++g) {
        Change change;
        raise_all(v_top[g], value_maxima(g), v_base[g], change, later.O[g]);
        if (change.any) state.scale(change.alpha, g);
      }
    } else {
      if (first.any) state.scale(first.alpha);
    }
    if (warp < key_warps) store_P(x.S, base, first.alpha, v_base, x.scale);
  }
  // Before the second part's values are added.
  __device__ void begin_later_part() {
    if constexpr (config.scaled) {
#pragma unroll
      for (int g = 0; g < groups; ++g)
        if (later.O[g].any) state.scale(later.O[g].alpha, g);
    } else {
      if (later.l.any) state.scale(later.l.alpha);
    }
    if (warp >= sum_warps) return;
#pragma unroll
    for (int c = 0; c < columns; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) state.l[c][e] = fmaf(state.l[c][e], later.l.alpha[c][e], later_sum(c, e, warp));
  }
  // Of a lane's two keys of the second part, for the warp that sums l.
  __device__ float& later_sum(int c, int e, int sum_warp) const {
    return shared<float>(layout.later_sums)[((sum_warp * columns + c) * 2 + e) * 32 + lane];
  }
  __device__ void add_values(int stage) {
    this->multiply_VP(state, stage, [&] {
      if constexpr (config.parts == 2) begin_later_part();
    });
  }

  // O of a leaf with scales, relative to m from now on.
  __device__ void rebase_O() {
#pragma unroll
    for (int g = 0; g < groups; ++g) {
      ColumnNumbers factor;
#pragma unroll
      for (int c = 0; c < columns; ++c)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          factor[c][e] = state.m[c][e] == minus_infinity<float> ? 1 : gpu::exp2_of(v_top[g][c][e] - state.m[c][e]);
      state.scale(factor, g);
    }
    clear_v_top();
  }
  __device__ void clear_v_top() {
#pragma unroll
    for (int g = 0; g < groups; ++g)
#pragma unroll
      for (int c = 0; c < columns; ++c) v_top[g][c][0] = v_top[g][c][1] = minus_infinity<float>;
  }
};

}  // namespace tessera::decode
