// SPDX-License-Identifier: Apache-2.0
// Attention of few rows over many keys, the column engine: K and V are left operands of mma.sync, straight from shared
// memory, and the rows (queries times the heads of a KV head) are columns, so that no row is padding beyond a multiple
// of eight and no column's bits depend on its neighbours. Persistent: blocks take nodes of the merge tree from a queue,
// or, where there are few, by their number; the last of a family to come merges it. Or a cluster has all nodes of a
// tile of rows, a block each, and its first block merges them. Device code; implements docs/algorithm.md, "Merge".
#pragma once

#include "decode/kernel/softmax.cuh"
#include "gpu/kernel/arrive.cuh"
#include "gpu/kernel/launch.cuh"
#include "gpu/kernel/quad.cuh"

namespace tessera::decode {

template <Config config>
struct Attend : Softmax<config> {
  using Base = Softmax<config>;
  using Base::key_warps, Base::state;
  using Base::layout, Base::R, Base::T, Base::p, Base::w, Base::lane, Base::warp, Base::columns, Base::values;
  using typename Base::Tile;

  using Base::Base;
  template <class Thing>
  __device__ Thing* shared(int offset) const {
    return Base::template shared<Thing>(offset);
  }

  // --- leaves, and the stack of a block

  // Where a tile's products do not need its values, they run a tile ahead, beside the products with the values of the
  // tile before: neither waits for the other, and a tile has one barrier less. Keys are then copied a tile further than
  // values.
  static constexpr bool ahead = !config.qv;
  static constexpr int value_reach = config.stages - 1, key_reach = value_reach + ahead;

  // All warps have arrived at a tile: what it needs is there, and nobody needs what the one before it needed. The
  // copies that have room now are issued; their rows have been found.
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
        if (lane < 4 && warp < sum_warps) shared<float>(layout.sums)[warp * R + State<config>::column(c, e)] = sum;
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

  __device__ float* stack_at(int level) const {
    constexpr int numbers = state_floats(R, config.Dv);
    if (level < config.levels) return shared<float>(layout.stack) + level * numbers;
    return p.memory.stacks + (Int64(blockIdx.x) * p.memory.stack_levels + level - config.levels) * numbers;
  }

  // Keys are the longest way off: their first tile is asked for before all else is found out. What is known of rows is
  // found by the last threads, which may have no row of K or V to find.
  __device__ void begin_copies(Int32 tile, Int32 end) {
    this->keep_row(tile, this->find_row(tile));
    __syncthreads();
    this->copy_keys(tile);
    if (const int r = config.threads() - 1 - int(threadIdx.x); r < R)
      shared<Column>(layout.columns)[r] = column_of(p, w, r);
#pragma unroll 1
    for (int n = 1; n < config.stages; ++n) this->keep_row(tile + n, this->find_row(tile + n));
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
  // waits on the stack for node n + 1 if n is even. What is left in the end lacks later siblings, which changes
  // nothing. `held`: levels of the stack that hold a state.
  __device__ void end_leaf(Int32 leaf, UInt32& held) {
    share_sums();
    if constexpr (config.scaled) this->rebase_O();
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
    this->clear_v_top();
    if constexpr (ahead) {
      place = this->find_row(tile + key_reach);
      gpu::wait_copies<config.stages - 1>();
      __syncthreads();
      if (warp < key_warps) this->multiply_KQ(x.S, tile % config.stages);
      this->score_tile(x, tile);
      this->keep_row(tile + key_reach, place);
      __syncthreads();  // maxima
      this->weigh_tile(x);
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
        this->add_values(stage);
        if (more) this->score_tile(x, tile + 1);
      } else {
        if (warp < key_warps) this->multiply_KQ(x.S, stage);
        this->score_tile(x, tile);
        __syncthreads();  // maxima
        this->weigh_tile(x);
        __syncthreads();  // P
        this->add_values(stage);
      }
      if (ends_leaf) end_leaf(leaf++, held);
      if constexpr (ahead) __syncthreads();  // maxima; and all are done with P and with the rows' places
      this->keep_row(tile + key_reach + 1, place);
      if constexpr (ahead)
        if (more) this->weigh_tile(x);
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
        __syncthreads();
        // Between barriers, so that one thread arrives for the block.
        if (threadIdx.x == 0) {
          const Int64 count = Int64(climbs) * p.memory.most_slots + slot_of(first);
          work.last_come = gpu::arrive(p.memory.counts + count) + 1 == UInt32(end - first);
        }
        __syncthreads();
        if (!work.last_come) return false;
        const auto slot = [&](int n) { return slot_of(family_first + n); };
        const Siblings there{first - family_first, end - family_first};
        merge_siblings(state, Family<config, decltype(slot)>{there, p.memory.states, slot},
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
          *gpu::number_of(p.call.lse, w.item.b, w.group.q_begin + i, h) =
              gpu::natural_lse_by_mantissa(state.m[c][e], l);
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
          out[State<config>::column(c, e % 2) * pitch + config.dims_at_once() * v + this->dim_of(e)] = state.O[v][c][e];
    __syncthreads();
    for (int n = threadIdx.x; n < w.group.rows.count * (config.Dv / 8); n += config.threads()) {
      const int r = n / (config.Dv / 8), first = n % (config.Dv / 8) * 8;
      if (first < p.Dv) store_dims(w.group.rows.first + r, first, out + r * pitch + first);
    }
  }
  // Eight dims of a row.
  __device__ void store_dims(Int32 row, int first, const float* x) const {
    auto* to = gpu::row_of<config.o>(p.call.o, w.item.b, w.group.q_begin + row / p.group,
                                     w.item.kv * p.group + row % p.group) +
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

  // --- work items

  // The item with the number that is kept there, if there is one; and its first copies. The first is the block's own;
  // those behind come from the queue. Without a queue, every so-many-th is the block's own.
  __device__ void take() {
    Work& work = *shared<Work>(layout.work);
    if (warp == 0) {
      if constexpr (config.direct)
        find_work(p, work);
      else
        take_work(p, work);
    }
    __syncthreads();
    if (w.exists && w.begin < w.end) begin_copies(w.begin / T, Int32(ceil_div(w.end, T)));
  }
  // A number behind the block's own, by the first thread. It is kept in a register: a store to shared memory would wait
  // for it.
  __device__ UInt32 ask_for_next() const {
    if (threadIdx.x > 0) return 0;
    return gridDim.x + (config.direct ? w.number : atomicAdd(&p.memory.queue->taken, 1u));
  }

  // The block's node of a group that its cluster has: nothing waits in memory for anybody.
  __device__ void run_in_cluster() {
    constexpr int blocks = config.cluster;
    if (threadIdx.x == 0) find_node(p, *shared<Work>(layout.work), blocks);
    __syncthreads();
    if (!w.exists) return;  // the cluster has no rows
    const Nodes nodes = w.item.siblings;
    const bool has_node = w.item.node < nodes.end;
    state.clear();
    if (has_node && w.begin < w.end) {
      const Int32 tile = w.begin / T, end = Int32(ceil_div(w.end, T));
      begin_copies(tile, end);
      attend_tiles(tile, end);
    }
    __syncthreads();  // the ring is free
    if constexpr (blocks > 1)
      if (nodes.count() > 1) {
        float* const own = shared<float>(layout.sibling);
        if (has_node) state.store(own);
        gpu::sync_cluster();
        const int first = nodes.first % blocks;
        if (w.item.node == nodes.first)
          merge_siblings(state, Neighbours<config>{{first, first + nodes.count()}, own}, shared<float>(layout.weights));
        gpu::sync_cluster();  // nobody ends while it is read
      }
    if (w.item.node == nodes.first) write();
  }

  __device__ void run() {
    if constexpr (config.cluster > 0) return run_in_cluster();
    Work& work = *shared<Work>(layout.work);
    if (threadIdx.x == 0) work.number = blockIdx.x;
    __syncwarp();
    take();
    while (w.exists) {
      const bool is_last = config.direct && w.number + gridDim.x >= w.items;
      const UInt32 next = ask_for_next();
      state.clear();
      if (w.begin < w.end) attend_tiles(w.begin / T, Int32(ceil_div(w.end, T)));
      __syncthreads();                                             // the ring is free
      if constexpr (config.direct) gpu::wait_for_kernel_before();  // it clears counts
      if (climb()) write();
      if (is_last) return;
      if (threadIdx.x == 0) work.number = next;
      __syncthreads();  // all are done with it
      take();
    }
  }
};

template <Config config>
__device__ void attend(const Params& p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  // What a block finds out by itself, and what it multiplies, is older than the kernel before, if there is one.
  if constexpr (!config.direct) gpu::wait_for_kernel_before();
  Attend<config>(p, memory).run();
  if constexpr (config.direct && config.cluster == 0) gpu::wait_for_kernel_before();
}

}  // namespace tessera::decode
