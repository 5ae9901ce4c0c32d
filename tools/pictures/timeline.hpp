// SPDX-License-Identifier: Apache-2.0
// What record_timeline writes and draw_pictures reads: when the warps of neighbouring blocks did what.
// Included by tools/pictures/record_timeline.cpp and timeline.cpp.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/pictures/svg.hpp"

namespace tessera::pictures {

// What a warp does from a stamp until its next one.
enum class Event { wait, load, multiply_QK, softmax, multiply_PV, barrier };
inline constexpr int event_count = 6;

struct Stamp {
  Event event;
  std::int64_t tile;
  std::int64_t cycle;  // of the multiprocessor's clock
};

struct Timeline {
  std::string gpu;
  int tile_queries = 0, tile_keys = 0, stages = 0;
  std::vector<double> shares;  // of all warps' cycles, event by event
  struct Block {
    std::int64_t number;
    std::vector<std::vector<Stamp>> warps;
  };
  std::vector<Block> blocks;  // of one multiprocessor, at the same time
  std::int64_t cycles = 0;    // length of the part that is kept; stamps count from its beginning
};

void save(const Timeline& timeline, const std::string& path);
Timeline read_timeline(const std::string& path);

}  // namespace tessera::pictures
