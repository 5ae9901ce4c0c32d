// SPDX-License-Identifier: Apache-2.0
// Clusters of blocks on the emulated machine: which blocks are there, and where all threads of a cluster meet. Included
// by tests/emulated/machine.hpp.
#pragma once

#include <functional>
#include <map>
#include <stdexcept>
#include <vector>

#include "tests/emulated/block.hpp"

namespace tessera::emulated {

struct Clusters {
  int blocks = 1;               // of a cluster of the next launch
  std::vector<Block*> present;  // that have begun and not ended
  std::map<int, Meeting> meetings;

  std::vector<Block*>& begin_launch() {
    present.clear(), meetings.clear();
    return present;
  }

  // A thread has come; how it knows that all have.
  std::function<bool()> meet(const Block& block, int threads) {
    Meeting& m = meetings[block.number / blocks];
    const int round = m.round;
    if (++m.inside == blocks * threads) m.inside = 0, ++m.round;
    return [&m, round] { return m.round != round; };
  }

  // Another block of the same cluster, whose memory is read: it must not have ended.
  const Block& neighbour(const Block& block, int rank) const {
    for (const Block* there : present)
      if (rank < blocks && there->number == block.number / blocks * blocks + rank) return *there;
    throw std::runtime_error("a load from a block that is not there");
  }
};

}  // namespace tessera::emulated
