// SPDX-License-Identifier: Apache-2.0
// The order of additions to the sums of dQ of one-pass backward kernels, without the arithmetic: blocks that wait for
// their turns, any number of which are resident. Included by tests/sm90/sm90_one_pass_test.cpp and
// tests/mma/mma_one_pass_test.cpp.
#pragma once

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "gpu/params.hpp"

namespace tessera::emulated {

// Lengths and masks of all kinds; memory for cu_seqlens stays with the caller.
inline gpu::Question random_question(std::mt19937& random, std::vector<Int32>& q, std::vector<Int32>& k) {
  const auto between = [&](Int64 least, Int64 most) { return least + Int64(random() % UInt64(most - least + 1)); };
  gpu::Question x{};
  x.B = Int32(between(1, 5)), x.Hk = Int32(between(1, 2)), x.Hq = x.Hk * Int32(between(1, 2));
  x.Nq = between(1, 700), x.Nk = between(1, 900);
  x.window_left = x.window_right = -1;
  if (random() % 2) x.causal = 1;
  if (random() % 3 == 0) x.window_left = between(0, 300);
  if (random() % 3 == 0 && !x.causal) x.window_right = between(0, 300);
  x.alignment = Int32(random() % 2);
  if (random() % 2) {
    q.assign(std::size_t(x.B) + 1, 0), k = q;
    if (random() % 2) q[0] = Int32(between(0, 400)), k[0] = Int32(between(0, 400));
    for (std::size_t b = 1; b < q.size(); ++b)
      q[b] = q[b - 1] + Int32(between(0, x.Nq)), k[b] = k[b - 1] + Int32(between(0, x.Nk));
    x.Nq = q.back() + between(0, 90), x.Nk = k.back() + between(0, 90);
    // Lengths that make no sense, too.
    for (auto* list : {&q, &k})
      while (random() % 3 == 0) (*list)[random() % list->size()] = Int32(between(-200, 1200));
    x.cu_seqlens_q = {q.data(), 1}, x.cu_seqlens_k = {k.data(), 1};
  }
  return x;
}

// An addition to a tile, and which of the tile's additions it is. Neighbours of one group, if they have one, are
// counted together.
struct Visit {
  Int64 tile;
  UInt32 turn;
  Int64 group = -1;
  bool waited = false;
};

// Blocks take work in order, `resident` of them are there at a time, and any of those may go on. visits_of: the
// additions of a work, in its order. `late`: a block counts its addition, or a group's, when it comes to the next one
// or group, not at once. Returns how many additions had to wait for their turn at least once, or -1 if all blocks wait.
template <class VisitsOf>
int run_turns(Int64 blocks, VisitsOf visits_of, int resident, bool late, std::mt19937& random) {
  struct Block {
    std::vector<Visit> visits;     // the next one last
    std::vector<Int64> uncounted;  // tiles
    Int64 group = -1;              // theirs
  };
  std::map<Int64, UInt32> counts;
  std::vector<Block> running;
  int waits = 0;
  const auto count = [&](Block& block) {
    for (const Int64 tile : block.uncounted) ++counts[tile];
    block.uncounted.clear();
  };
  const auto must_count = [&](const Block& block) {
    if (block.uncounted.empty() || block.visits.empty()) return !block.uncounted.empty();
    return block.group < 0 || block.visits.back().group != block.group;
  };
  const auto may_go_on = [&](const Block& block) {
    return must_count(block) || block.visits.empty() || counts[block.visits.back().tile] == block.visits.back().turn;
  };
  for (Int64 next = 0; next < blocks || !running.empty();) {
    while (next < blocks && int(running.size()) < resident) {
      running.push_back({visits_of(next++)});
      std::reverse(running.back().visits.begin(), running.back().visits.end());
    }
    std::shuffle(running.begin(), running.end(), random);
    bool progress = false;
    for (Block& block : running)
      for (bool goes_on = true; goes_on && random() % 4;) {
        if (must_count(block)) count(block), progress = true;
        if (block.visits.empty()) break;
        Visit& v = block.visits.back();
        goes_on = counts[v.tile] == v.turn;
        if (goes_on) {
          block.uncounted.push_back(v.tile), block.group = v.group;
          block.visits.pop_back(), progress = true;
          if (!late) count(block);
        } else {
          waits += !v.waited, v.waited = true;
        }
      }
    if (!progress && !running.empty() && std::none_of(running.begin(), running.end(), may_go_on)) return -1;
    std::erase_if(running, [](const Block& block) { return block.visits.empty() && block.uncounted.empty(); });
  }
  return waits;
}

}  // namespace tessera::emulated
