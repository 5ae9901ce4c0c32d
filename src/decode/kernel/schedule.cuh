// SPDX-License-Identifier: Apache-2.0
// Which work items there are: one block reads the lengths on the device, chooses the level of the merge tree at which
// sequences are cut, and writes everything that the attention kernel reads of the workspace. No result depends on it.
// Where blocks find their work items themselves, it clears counts.
// Device code; docs/gpu_kernels.md, "decode".
#pragma once

#include "decode/kernel/work.cuh"
#include "gpu/kernel/launch.cuh"

namespace tessera::decode {

inline constexpr int most_levels = 32;  // a lane of a warp for each

// Where the items of a group, their partial ones and their states begin.
struct Bases {
  UInt32 full, partial, slot;
};

template <int threads>
struct ScheduleShared {
  static constexpr int warps = threads / 32;
  Nodes leaves[threads];  // of the groups at hand, a thread for each; none: it has no rows
  Bases bases[threads];
  LevelCount counts[warps][most_levels];  // of a warp's groups
  Load loads[warps];
  LevelCount count;  // of the chosen level
  int level;
  Bases taken;  // by the items that are written
};

// Group n of p.groups, by one thread. False: it has no rows, or is nobody's.
__device__ inline bool find_group(const Params& p, Int32 n, Group& group) {
  const Int32 queries = p.groups.block_queries, tiles = queries == 0 ? p.tiles : p.groups.block_tiles;
  const UInt32 block = UInt32(n) / UInt32(tiles);
  Int32 b = Int32(block), tile = n - b * tiles;
  if (queries > 0) {
    const gpu::Question& x = p.call.x;
    const gpu::BlockPlace at = gpu::place_of(block, queries, x.B, x.Nq, x.cu_seqlens_q);
    if (at.first >= x.Nq) return false;
    b = at.b, tile += Int32(at.first / queries) * tiles;
  }
  return look_at(p, b, tile, group);
}

// Of a group cut at a level: its nodes, and whether the first and the last lack leaves.
struct Cut {
  Nodes nodes;
  bool first_partial, last_partial;  // with one node, both say the same
  __device__ Cut(Nodes leaves, int level) : nodes(leaves.above(level)) {
    const auto lacks = [&](Int32 node) { return leaves_under(leaves, node, level).count() < 1 << level; };
    first_partial = lacks(nodes.first), last_partial = lacks(nodes.end - 1);
  }
  __device__ Int32 partial() const { return first_partial + (nodes.count() > 1 && last_partial); }
  __device__ bool is_partial(Int32 node) const {
    return (node == nodes.first && first_partial) || (node == nodes.end - 1 && last_partial);
  }
  // How many full ones, or partial ones, come before it.
  __device__ Int32 full_before(Int32 node) const { return node - nodes.first - (node > nodes.first && first_partial); }
  __device__ Int32 partial_before(Int32 node) const { return node > nodes.first && first_partial; }
};

template <ScheduleConfig config>
struct Schedule {
  static constexpr int threads = config.threads, warps = threads / 32;
  using Shared = ScheduleShared<threads>;
  static_assert(sizeof(Shared) <= schedule_bytes);

  const Params& p;
  Shared& shared;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  // A thread looks at one group: its lengths, its masks. `keeps`: for the attention kernel.
  __device__ void find_leaves(Int32 first, bool keeps) {
    const Int32 n = first + Int32(threadIdx.x);
    Nodes leaves{};
    Group group;
    if (n < p.groups.count && find_group(p, n, group)) {
      leaves = leaves_of(group.rows.keys);
      if (keeps) p.memory.groups[n] = group;
    }
    shared.leaves[threadIdx.x] = leaves;
  }

  // What every level would cost: a warp goes through its groups, a lane counts for its level.
  __device__ void count_levels(Int32 groups, LevelCount& count, Load& load) const {
    const int level = lane < p.levels ? lane : p.levels;
    const Int64 heads = p.call.x.Hk;
    for (Int32 n = warp; n < groups; n += warps) {
      const Nodes leaves = shared.leaves[n];
      if (leaves.count() == 0) continue;
      const Cut cut(leaves, level);
      const Int64 items = cut.nodes.count() * heads;
      count.items += items, count.full += items - cut.partial() * heads;
      if (cut.nodes.count() > 1) count.slots += items;
      load.leaves += leaves.count() * heads, load.longest = greater(load.longest, leaves.count());
    }
  }

  // By the first warp: the level, from the counts of all.
  __device__ void choose_level() const {
    LevelCount count;
    Load load;
    for (int n = 0; n < warps; ++n) {
      const LevelCount& more = shared.counts[n][lane];
      count.items += more.items, count.full += more.full, count.slots += more.slots;
      load.leaves += shared.loads[n].leaves, load.longest = greater(load.longest, shared.loads[n].longest);
    }
    const bool able = lane <= p.levels && count.slots <= p.memory.most_slots;
    const Int64 cost = able ? cost_of(count, load, lane, p.workers) : Int64(1) << 60;
    Int64 least = cost;
    for (int distance = 16; distance > 0; distance /= 2)
      least = lesser(least, __shfl_xor_sync(0xffffffffu, least, distance));
    const int level = 31 - __clz(int(__ballot_sync(0xffffffffu, able && is_near(cost, least))));
    if (lane != level) return;
    shared.level = level, shared.count = count, shared.taken = {};
    *p.memory.queue = {level, Int32(count.items), 0, 0};
  }

  // Room for the items of each thread's group: full ones first, then those that lack leaves, so that the longest are
  // taken first.
  __device__ void take_room() {
    const Nodes leaves = shared.leaves[threadIdx.x];
    if (leaves.count() == 0) return;
    const Cut cut(leaves, shared.level);
    const Int32 heads = p.call.x.Hk, count = cut.nodes.count();
    shared.bases[threadIdx.x] = {
        atomicAdd(&shared.taken.full, UInt32(count - cut.partial()) * heads),
        atomicAdd(&shared.taken.partial, UInt32(cut.partial()) * heads) + UInt32(shared.count.full),
        count > 1 ? atomicAdd(&shared.taken.slot, UInt32(count) * heads) : 0};
  }

  // The items of the groups at hand, each by `team` threads. Heads count fastest: their keys lie side by side.
  __device__ void write_items(Int32 first, Int32 groups) const {
    int team = threads;
    while (team > 32 && threads / team < groups) team /= 2;
    for (Int32 n = threadIdx.x / team; n < groups; n += threads / team) {
      const Nodes leaves = shared.leaves[n];
      if (leaves.count() == 0) continue;
      const Cut cut(leaves, shared.level);
      const Bases at = shared.bases[n];
      const Group& group = p.memory.groups[first + n];
      const Int32 heads = p.call.x.Hk, count = cut.nodes.count(), b = group.b, tile = group.tile;
      for (Int32 r = threadIdx.x % team; r < count * heads; r += team) {
        const Int32 kv = r % heads, node = cut.nodes.first + r / heads;
        const UInt32 place = cut.is_partial(node) ? at.partial + cut.partial_before(node) * heads
                                                  : at.full + cut.full_before(node) * heads;
        p.memory.items[place + kv] = {.b = b,
                                      .kv = kv,
                                      .tile = tile,
                                      .node = node,
                                      .siblings = cut.nodes,
                                      .slot = count > 1 ? Int32(at.slot) + kv * count : -1,
                                      .group = first + n};
      }
    }
  }

  // What is 0 at first, and what is told of lengths.
  __device__ void prepare() const {
    const Int64 counts = Int64(p.memory.climbs) * p.memory.most_slots;
    for (Int64 n = threadIdx.x; n < counts; n += threads) p.memory.counts[n] = 0;
    if (!p.pages.status) return;
    for (Int32 b = threadIdx.x; b < p.call.x.B; b += threads)
      if (gpu::is_cut(p.call.x, p.pages, p.most, b)) atomicOr(p.pages.status, gpu::beyond_bounds);
  }

  // The groups are gone through twice, as many at a time as there are threads: to choose the level, and to write their
  // items. So few instructions are better than fast ones: what runs once comes from memory.
  __device__ void run() {
    LevelCount count;
    Load load;
    prepare();
    if (!p.memory.queue) return;
#pragma unroll 1
    for (int writes = 0; writes < 2; ++writes) {
#pragma unroll 1
      for (Int32 first = 0; first < p.groups.count; first += threads) {
        const Int32 groups = Int32(lesser(threads, p.groups.count - first));
        if (!writes || p.groups.count > threads) {
          __syncthreads();  // all are done with those before
          find_leaves(first, !writes);
        }
        if (writes) take_room();  // of the thread's own group
        __syncthreads();
        if (writes)
          write_items(first, groups);
        else
          count_levels(groups, count, load);
      }
      if (writes) return;
      shared.counts[warp][lane] = count;
      if (lane == 0) shared.loads[warp] = load;
      __syncthreads();
      if (warp == 0) choose_level();
      __syncthreads();
    }
  }
};

template <ScheduleConfig config>
__device__ void schedule(const Params& p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  gpu::start_kernel_after();
  Schedule<config>{p, *reinterpret_cast<ScheduleShared<config.threads>*>(memory)}.run();
}

}  // namespace tessera::decode
