// SPDX-License-Identifier: Apache-2.0
// Attention of few rows over many keys, the column engine: K and V are left operands of mma.sync, straight from shared
// memory, and the rows (queries times the heads of a KV head) are columns, so that no row is padding beyond a multiple
// of eight and no column's bits depend on its neighbours. Persistent: blocks take nodes of the merge tree from a queue;
// the last of a family to come merges it. Device code; implements docs/algorithm.md, "Online softmax" and "Merge".
#pragma once

#include "decode/kernel/products.cuh"
#include "gpu/kernel/launch.cuh"
#include "gpu/kernel/quad.cuh"
#include "gpu/kernel/scores.cuh"

namespace tessera::decode {

template <Config config>
struct Attend : Products<config> {
  using Base = Products<config>;
  using Base::layout, Base::R, Base::T, Base::p, Base::w, Base::lane, Base::warp, Base::columns, Base::values;
  using typename Base::Scores;
  static constexpr int key_warps = T / 16;  // those that multiply S: 16 keys each
  using ColumnNumbers = float[columns][2];

  State<config> state{};
  // With scales, P times the scale of a value is relative to a maximum of its own, of each group of dims: what V's
  // products are small or large by must not be lost in 16 bits. A state's O is relative to m, from the end of its leaf
  // on.
  static constexpr int groups = config.v_groups;
  ColumnNumbers v_top[groups];

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
  static constexpr int value_maxima(int group) { return (1 + group) * warps * R; }  // behind those of scores
  // A maximum, what exponents are relative to, and what sums must be multiplied by. True: some of them are changed.
  __device__ bool raise(ColumnNumbers& top, int place, ColumnNumbers& base, ColumnNumbers& alpha) const {
    bool changes = false;
#pragma unroll
    for (int c = 0; c < columns; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float before = top[c][e];
#pragma unroll
        for (int n = 0; n < key_warps; ++n)
          top[c][e] = fmaxf(top[c][e], shared<const float>(layout.maxima)[place + n * R + State<config>::column(c, e)]);
        base[c][e] = exponent_base(top[c][e]);
        alpha[c][e] = gpu::exp2_of(before - base[c][e]);
        changes = changes || alpha[c][e] != 1;
      }
    return __any_sync(0xffffffffu, changes);
  }
  // P of a warp's 16 keys, in 16 bits, a row for each key; l of what it was before it was rounded. With scales, what is
  // stored is P times the value's scale, relative to v_base: once for each group of dims.
  __device__ void store_P(const Scores& S, const ColumnNumbers& base, const ColumnNumbers& alpha,
                          const ColumnNumbers (&v_base)[groups], const ValueScale (&scale)[groups]) {
    const int key = 16 * warp + lane / 4;
    const UInt32 p_lane = this->address(layout.P) + p_byte(R, key, lane % 4 * 2);
#pragma unroll
    for (int c = 0; c < columns; ++c) {
      float P[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) P[e] = gpu::exp2_of(S[c][e] - base[c][e % 2]);
#pragma unroll
      for (int e = 0; e < 2; ++e) state.l[c][e] = fmaf(state.l[c][e], alpha[c][e], P[e] + P[2 + e]);
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

  // --- leaves, and the stack of a block

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
  // Behind a barrier: the state's O and l are relative to the new maxima, and P of the tile is there for all warps.
  __device__ void weigh_tile(const Tile& x) {
    ColumnNumbers base, alpha, v_base[groups];
    const bool changes = raise(state.m, 0, base, alpha);
    if constexpr (config.scaled) {
#pragma unroll
      for (int g = 0; g < groups; ++g) {
        ColumnNumbers v_alpha;
        if (raise(v_top[g], value_maxima(g), v_base[g], v_alpha)) state.scale(v_alpha, g);
      }
    } else {
      if (changes) state.scale(alpha);
    }
    if (warp < key_warps) store_P(x.S, base, alpha, v_base, x.scale);
  }

  // Where a tile's products do not need its values, they run a tile ahead, beside the products with the values of the
  // tile before: neither waits for the other, and a tile has one barrier less. Keys are then copied a tile further than
  // values.
  static constexpr bool ahead = !config.qv;
  static constexpr int value_reach = config.stages - 1, key_reach = value_reach + ahead;

  // All warps have arrived at a tile: what it needs is there, and nobody needs what the one before it needed. The copies
  // that have room now are issued; their rows have been found.
  __device__ void come_to(Int32 tile, Int32 end) const {
    gpu::wait_copies<config.stages - 2>();
    __syncthreads();
    if (tile + key_reach < end) this->copy_keys(tile + key_reach);
    if (tile + value_reach < end) this->copy_values(tile + value_reach);
    gpu::commit_copies();
  }

  // l of a leaf, from the lanes and warps that have summed parts of it, in a fixed order: all threads get it.
  __device__ void share_sums() {
#pragma unroll
    for (int c = 0; c < columns; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float sum = state.l[c][e];
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        if (lane < 4) shared<float>(layout.sums)[warp * R + State<config>::column(c, e)] = sum;
      }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < columns; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float* sums = shared<const float>(layout.sums) + State<config>::column(c, e);
        state.l[c][e] = (sums[0] + sums[R]) + (sums[2 * R] + sums[3 * R]);
      }
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

  __device__ float* stack_at(int level) const {
    constexpr int numbers = state_floats(R, config.Dv);
    if (level < config.levels) return shared<float>(layout.stack) + level * numbers;
    return p.memory.stacks + (Int64(blockIdx.x) * p.memory.stack_levels + level - config.levels) * numbers;
  }

  // Keys are the longest way off: their first tile is asked for before all else.
  __device__ void begin_copies(Int32 tile, Int32 end) {
    for (int n = 0; n < config.stages; ++n) this->keep_row(tile + n, this->find_row(tile + n));
    __syncthreads();
    this->copy_keys(tile);
    if (threadIdx.x < R) shared<Column>(layout.columns)[threadIdx.x] = column_of(p, w, threadIdx.x);
    __syncthreads();
    this->copy_Q();
    if constexpr (!ahead) this->copy_values(tile);
    gpu::commit_copies();
#pragma unroll
    for (int n = 1; n < key_reach; ++n) {
      if (tile + n < end) this->copy_keys(tile + n);
      if (tile + n - ahead < end) this->copy_values(tile + n - ahead);
      gpu::commit_copies();
    }
  }

  // The state is that of a whole leaf, and is merged with those before it as a binary counter counts: node n of a level
  // waits on the stack for node n + 1 if n is even. What is left in the end lacks later siblings, which changes nothing.
  // `held`: levels of the stack that hold a state.
  __device__ void end_leaf(Int32 leaf, UInt32& held) {
    share_sums();
    if constexpr (config.scaled) rebase_O();
    const UInt32 number = leaf - (w.item.node << w.level);
    const bool last = leaf + 1 == w.leaves.end;
    int level = 0;
    for (; (number >> level & 1) || (last && held >> level); ++level)
      if (held >> level & 1) state.merge_after(stack_at(level)), held &= ~(1u << level);
    if (last) return;
    state.store(stack_at(level)), held |= 1u << level;
    state.clear();
  }

  // The tiles of the item, leaf after leaf.
  __device__ void attend_tiles(Int32 tile, Int32 end) {
    Tile x;
    typename Base::Place place;
    clear_v_top();
    if constexpr (ahead) {
      place = this->find_row(tile + key_reach);
      gpu::wait_copies<config.stages - 1>();
      __syncthreads();
      if (warp < key_warps) this->multiply_KQ(x.S, tile % config.stages);
      score_tile(x, tile);
      this->keep_row(tile + key_reach, place);
      __syncthreads();  // maxima
      weigh_tile(x);
    }
    Int32 leaf = w.leaves.first;
    UInt32 held = 0;
#pragma unroll 1
    for (; tile < end; ++tile) {
      come_to(tile, end);  // and P is there, if it was made ahead
      place = this->find_row(tile + key_reach + 1);
      const int stage = tile % config.stages;
      const bool more = tile + 1 < end, ends_leaf = (tile + 1) % (leaf_keys / T) == 0 || !more;
      if constexpr (ahead) {
        if (more && warp < key_warps) this->multiply_KQ(x.S, (tile + 1) % config.stages);
        this->multiply_VP(state, stage);
        if (more) score_tile(x, tile + 1);
      } else {
        if (warp < key_warps) this->multiply_KQ(x.S, stage);
        score_tile(x, tile);
        __syncthreads();  // maxima
        weigh_tile(x);
        __syncthreads();  // P
        this->multiply_VP(state, stage);
      }
      if (ends_leaf) end_leaf(leaf++, held);
      if constexpr (ahead) __syncthreads();  // maxima; and all are done with P and with the rows' places
      this->keep_row(tile + key_reach + 1, place);
      if constexpr (ahead)
        if (more) weigh_tile(x);
    }
    gpu::wait_copies<0>();
  }

  // --- siblings in other blocks

  // The item's state becomes that of the root, if this block is the last of every family on the way. False: another
  // block will go on.
  __device__ bool climb() {
    constexpr int numbers = state_floats(R, config.Dv);
    Work& work = *shared<Work>(layout.work);
    Nodes nodes = w.item.siblings;
    Int32 node = w.item.node;
    for (int climbs = 0; nodes.count() > 1; ++climbs) {
      const Int32 parent = node >> family_levels, family_first = parent << family_levels;
      const Int32 first = family_first > nodes.first ? family_first : nodes.first;
      const Int32 end = family_first + family < nodes.end ? family_first + family : nodes.end;
      // The state of a node lies in the slot of the first item under it.
      const auto slot_of = [&](Int32 n) {
        const Int32 item = n << climbs * family_levels;
        return w.item.slot + (item > w.item.siblings.first ? item - w.item.siblings.first : 0);
      };
      if (end - first > 1) {
        state.store(p.memory.states + Int64(slot_of(node)) * numbers);
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
          const Int64 count = Int64(climbs) * p.memory.most_slots + slot_of(first);
          work.last_come = atomicAdd(&p.memory.counts[count], 1u) + 1 == UInt32(end - first);
        }
        __syncthreads();
        if (!work.last_come) return false;
        __threadfence();
        const auto slot = [&](int n) { return slot_of(family_first + n); };
        merge_family(state, Family<decltype(slot)>{first - family_first, end - family_first, p.memory.states, slot},
                     shared<float>(layout.weights));
        __syncthreads();  // of the weights, which the next family needs room for
      }
      nodes = nodes.above(family_levels), node = parent;
    }
    return true;
  }
  // --- the end: the sink, O / l and LSE

  // Rows that see no key: O = 0, LSE = -inf, or the sink.
  __device__ void write() {
    float factor[columns][2];
#pragma unroll
    for (int c = 0; c < columns; ++c)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = State<config>::column(c, e);
        const bool exists = column < w.group.rows.count;
        const Int32 row = w.group.rows.first + (exists ? column : 0);
        const Int32 i = row / p.group, h = w.item.kv * p.group + row % p.group;
        if (p.call.x.sinks) state.merge_sink(c, e, p.call.x.sinks[h * p.call.x.sink_head] * log2e<float>);
        const float l = state.l[c][e];
        factor[c][e] = l == 0 ? 0 : 1 / l;
        if (State<config>::speaks() && exists && p.call.lse.data)
          *gpu::number_of(p.call.lse, w.item.b, w.group.q_begin + i, h) = gpu::natural_lse_by_mantissa(state.m[c][e], l);
      }
    state.scale(factor);
    float* const out = shared<float>(layout.out);
    constexpr int pitch = out_pitch(config.Dv);
#pragma unroll
    for (int v = 0; v < values; ++v)
#pragma unroll
      for (int c = 0; c < columns; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          out[State<config>::column(c, e % 2) * pitch + 64 * v + this->dim_of(e)] = state.O[v][c][e];
    __syncthreads();
    for (int n = threadIdx.x; n < w.group.rows.count * (config.Dv / 8); n += threads) {
      const int r = n / (config.Dv / 8), first = n % (config.Dv / 8) * 8;
      if (first < p.Dv) store_dims(w.group.rows.first + r, first, out + r * pitch + first);
    }
  }
  // Eight dims of a row.
  __device__ void store_dims(Int32 row, int first, const float* x) const {
    auto* to =
        gpu::row_of<config.o>(p.call.o, w.item.b, w.group.q_begin + row / p.group, w.item.kv * p.group + row % p.group) +
        first;
    if constexpr (config.o == Element::f32) {
      for (int n = 0; n < 8 && first + n < p.Dv; ++n) to[n] = x[n];
    } else {
      UInt32 pairs[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) pairs[n] = gpu::packed<config.o>(x[2 * n], x[2 * n + 1]);
      gpu::store_columns(to, pairs, p.Dv - first);
    }
  }

  // One work item; false: there was none. The first is the block's own, those behind come from the queue: the next is
  // asked for while this one's first copies are on their way.
  __device__ bool run() {
    Work& work = *shared<Work>(layout.work);
    if (warp == 0) take_work(p, work);
    __syncthreads();
    if (!w.exists) return false;
    const Int32 tile = w.begin / T, end = Int32(ceil_div(w.end, T));
    const bool has_keys = w.begin < w.end;
    if (has_keys) begin_copies(tile, end);
    if (threadIdx.x == 0) work.number = gridDim.x + atomicAdd(&p.memory.queue->taken, 1u);
    state.clear();
    if (has_keys) attend_tiles(tile, end);
    __syncthreads();  // the ring is free
    if (climb()) write();
    __syncthreads();  // all are done with it
    return true;
  }
};

template <Config config>
__device__ void attend(const Params& p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  gpu::wait_for_kernel_before();
  Attend<config> block(p, memory);
  if (threadIdx.x == 0) block.template shared<Work>(block.layout.work)->number = blockIdx.x;
  __syncwarp();
  while (block.run()) {
  }
}

}  // namespace tessera::decode
