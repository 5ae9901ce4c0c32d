// SPDX-License-Identifier: Apache-2.0
// The launches of a `decode` plan on the emulated machine, with what a GPU leaves open decided by the test: how many
// multiprocessors there are, at which level sequences are cut, and in which order work items are finished. Included by
// the tests of tests/decode that run the kernels' text; see tests/emulated/machine.hpp.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/decode/decode_cases.hpp"
#include "tests/emulated/watch.hpp"

// Device code, behind what stands in for CUDA.
#include "decode/kernel/work.cuh"

namespace tessera::decode {

struct Run {
  const char* architecture = "sm_90a";
  int multiprocessors = 2;
  std::optional<int> level{};              // instead of the one that the schedule chooses
  std::optional<std::uint32_t> shuffle{};  // items in a random order, by this seed
  bool direct = false;                     // without a queue
};

// The leaves that some row of a tile of a sequence sees, key by key; leaf 0 if there is none.
struct ModelGroup {
  Int32 b, tile;
  std::set<Int32> leaves{};
};
inline std::vector<ModelGroup> model_groups(const Params& p) {
  std::vector<ModelGroup> groups;
  for (Int32 b = 0; b < p.call.x.B; ++b)
    for (Int32 tile = 0; tile < p.tiles; ++tile) {
      const gpu::DeviceSequence s = sequence_of(p, b).s;
      const Int64 first = Int64(tile) * p.rows, end = lesser(first + p.rows, s.nq * p.group);
      if (first >= end) continue;
      ModelGroup group{b, tile};
      for (Int64 i = first / p.group; i <= (end - 1) / p.group; ++i)
        for (Int64 j = 0; j < s.nk; ++j)
          if (s.mask.visible(i, j)) group.leaves.insert(Int32(j / leaf_keys));
      if (group.leaves.empty()) group.leaves.insert(0);
      groups.push_back(group);
    }
  return groups;
}

// The items of all sequences, cut at a level: what the schedule should write, in any order.
inline std::vector<Item> model_items(const Params& p, const std::vector<ModelGroup>& groups, int level) {
  std::vector<Item> items;
  Int32 slots = 0;
  for (const ModelGroup& group : groups) {
    std::set<Int32> nodes;
    for (const Int32 leaf : group.leaves) nodes.insert(leaf >> level);
    const auto count = static_cast<Int32>(nodes.size());
    for (Int32 kv = 0; kv<p.call.x.Hk; ++kv, slots += count> 1 ? count : 0)
      for (const Int32 node : nodes)
        items.push_back(
            {group.b, kv, group.tile, node, {*nodes.begin(), *nodes.rbegin() + 1}, count > 1 ? slots : -1, 0});
  }
  return items;
}

// After the schedule: another level, another order.
inline void rearrange(const Params& p, const Run& run) {
  std::vector<Item> items(p.memory.items, p.memory.items + p.memory.queue->items);
  if (run.level) {
    std::map<std::pair<Int32, Int32>, Int32> groups;  // what the schedule has found out about them stays
    for (const Item& item : items) groups[{item.b, item.tile}] = item.group;
    items = model_items(p, model_groups(p), *run.level), p.memory.queue->level = *run.level;
    for (Item& item : items) item.group = groups.at({item.b, item.tile});
  }
  ASSERT_LE(items.size(), static_cast<std::size_t>(p.memory.most_items));
  if (run.shuffle) {
    std::mt19937 random(*run.shuffle);
    std::shuffle(items.begin(), items.end(), random);
  }
  p.memory.queue->items = static_cast<Int32>(items.size());
  std::copy(items.begin(), items.end(), p.memory.items);
}

using Units = std::map<std::string, void (*)(const void* params)>;

// A workspace of NaN, the schedule, then the attention kernel. `memory`: the block's.
template <std::size_t memory_bytes>
void run_plan(const Problem& problem, Call call, const Run& run, const Units& units,
              unsigned char (&memory)[memory_bytes]) {
  const cuda::Target target = target_of(run.architecture, run.multiprocessors);
  const gpu::Steps steps = steps_of(problem, target, run.direct);
  ASSERT_EQ(steps.reason, "");
  std::vector<float4> workspace(static_cast<std::size_t>(steps.own_bytes) / 16 + 1);
  std::memset(workspace.data(), 0xff, workspace.size() * 16);
  call.execution.workspace = workspace.data();
  const gpu::PassParams common = gpu::forward_params(problem, call, steps.score_scale);
  const gpu::Given given{call, common, reinterpret_cast<std::byte*>(workspace.data())};
  const emulated::Watch watch(call, workspace.data(), workspace.size() * 16);
  emulated::Machine& machine = emulated::Machine::here();
  machine.memory = memory;
  for (const gpu::Step& step : steps.list) {
    const auto unit = units.find(step.unit);
    ASSERT_NE(unit, units.end()) << "this test has no " << step.unit;
    Params params;
    step.write_parameters(given, &params);
    ASSERT_LE(step.shared_bytes, static_cast<int>(memory_bytes));
    if (step.name == "decode_attend" && (run.level || run.shuffle)) rearrange(params, run);
    machine.shared_bytes = static_cast<std::size_t>(step.shared_bytes), machine.clusters.blocks = step.cluster;
    ASSERT_EQ(params.memory.queue == nullptr, run.direct);
    if (!run.direct) machine.tickets(&params.memory.queue->taken);
    machine.run(
        static_cast<int>(step.blocks), step.threads, 0, [&] { unit->second(&params); }, step.programmatic);
  }
  machine.clusters.blocks = 1;
}

inline Call call_of(const cases::CaseData& data) {
  Call call{};
  call.inputs = data.inputs(), call.options = data.options(), call.outputs = data.outputs();
  if (data.spec.no_lse) call.outputs.lse = {};
  return call;
}
inline Problem problem_of(const Call& call) { return check_forward(call.inputs, call.outputs, call.options, {}); }

}  // namespace tessera::decode
