// SPDX-License-Identifier: Apache-2.0
// Which work items there are: one block reads the lengths on the device, chooses the level of the merge tree at which
// sequences are cut, and writes everything that the attention kernel reads of the workspace. No result depends on it.
// Device code; docs/gpu_kernels.md, "decode".
#pragma once

#include "decode/kernel/work.cuh"
#include "gpu/kernel/lanes.cuh"

namespace tessera::decode {

inline constexpr int most_levels = 32;

struct ScheduleShared {
  LevelCount counts[most_levels];
  Load load;
  int level;
  UInt32 full, partial, slots;  // of the items that are written: how many so far
};
static_assert(sizeof(ScheduleShared) <= schedule_bytes);

// A tile of rows of a sequence.
struct Group {
  Int32 b, tile;
};
// Group n of p.groups. False: nobody's.
__device__ inline bool find_group(const Params& p, Int32 n, Group& group) {
  group = {n / p.tiles, n % p.tiles};
  const Int32 queries = p.groups.block_queries, tiles = p.groups.block_tiles;
  if (queries == 0) return true;
  const gpu::Question& x = p.call.x;
  const gpu::BlockPlace at = gpu::place_of(n / tiles, queries, x.B, x.Nq, x.cu_seqlens_q);
  group = {at.b, Int32(at.first / queries) * tiles + n % tiles};
  return at.first < x.Nq;
}
// False: it has no rows.
__device__ inline bool leaves_of_group(const Params& p, Int32 n, Group& group, Nodes& leaves) {
  if (!find_group(p, n, group)) return false;
  const RowTile rows = rows_of_tile(p, sequence_of(p, group.b).s, group.tile);
  leaves = leaves_of(rows.keys);
  return rows.count > 0;
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

// What a level costs, by the lanes of a warp.
__device__ inline void count_level(const Params& p, int level, ScheduleShared& shared) {
  const int lane = threadIdx.x % 32;
  LevelCount count;
  Load load;
  for (Int32 n = lane; n < p.groups.count; n += 32) {
    Group group;
    Nodes leaves;
    if (!leaves_of_group(p, n, group, leaves)) continue;
    const Cut cut(leaves, level);
    const Int64 items = Int64(cut.nodes.count()) * p.call.x.Hk;
    count.items += items, count.full += items - Int64(cut.partial()) * p.call.x.Hk;
    if (cut.nodes.count() > 1) count.slots += items;
    load.leaves += Int64(leaves.count()) * p.call.x.Hk, load.longest = greater(load.longest, leaves.count());
  }
  Int64 sums[] = {count.items, count.full, count.slots, load.leaves};
  gpu::sum_over_lanes<32>(sums);
  for (int distance = 16; distance > 0; distance /= 2)
    load.longest = greater(load.longest, __shfl_xor_sync(0xffffffffu, load.longest, distance));
  if (lane != 0) return;
  shared.counts[level] = {sums[0], sums[1], sums[2]};
  if (level == 0) shared.load = {sums[3], load.longest};
}

// The items of group n, by the lanes of a warp: full ones first, then those that lack leaves, so that the longest are
// taken first. Heads count fastest: their keys lie side by side.
__device__ inline void write_items(const Params& p, Int32 n, ScheduleShared& shared) {
  const int lane = threadIdx.x % 32;
  Group group;
  Nodes leaves;
  if (!leaves_of_group(p, n, group, leaves)) return;
  const Cut cut(leaves, shared.level);
  const Int32 heads = p.call.x.Hk, count = cut.nodes.count();
  UInt32 full = 0, partial = 0, slot = 0;
  if (lane == 0) {
    full = atomicAdd(&shared.full, UInt32(count - cut.partial()) * heads);
    partial = atomicAdd(&shared.partial, UInt32(cut.partial()) * heads) + UInt32(shared.counts[shared.level].full);
    if (count > 1) slot = atomicAdd(&shared.slots, UInt32(count) * heads);
  }
  full = __shfl_sync(0xffffffffu, full, 0), partial = __shfl_sync(0xffffffffu, partial, 0);
  slot = __shfl_sync(0xffffffffu, slot, 0);
  for (Int32 r = lane; r < count * heads; r += 32) {
    const Int32 kv = r % heads, node = cut.nodes.first + r / heads;
    const UInt32 place =
        cut.is_partial(node) ? partial + cut.partial_before(node) * heads : full + cut.full_before(node) * heads;
    p.memory.items[place + kv] = {.b = group.b,
                                  .kv = kv,
                                  .tile = group.tile,
                                  .node = node,
                                  .siblings = cut.nodes,
                                  .slot = count > 1 ? Int32(slot) + kv * count : -1,
                                  .unused = 0};
  }
}

template <ScheduleConfig config>
__device__ void schedule(const Params& p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<ScheduleShared*>(memory);
  constexpr int warps = config.threads / 32;
  const int warp = threadIdx.x / 32, levels = levels_above(ceil_div(p.most.keys, leaf_keys));
  for (int level = warp; level <= levels; level += warps) count_level(p, level, shared);
  if (p.pages.status)
    for (Int32 b = threadIdx.x; b < p.call.x.B; b += config.threads)
      if (gpu::is_cut(p.call.x, p.pages, p.most, b)) atomicOr(p.pages.status, gpu::beyond_bounds);
  const Int64 counts = Int64(p.memory.climbs) * p.memory.most_slots;
  for (Int64 n = threadIdx.x; n < counts; n += config.threads) p.memory.counts[n] = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    shared.level = chosen_level(shared.counts, levels, shared.load, p.workers, p.memory.most_slots);
    shared.full = shared.partial = shared.slots = 0;
    *p.memory.queue = {shared.level, Int32(shared.counts[shared.level].items), 0, 0};
  }
  __syncthreads();
  for (Int32 n = warp; n < p.groups.count; n += warps) write_items(p, n, shared);
}

}  // namespace tessera::decode
