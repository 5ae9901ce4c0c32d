// SPDX-License-Identifier: Apache-2.0
// The tile of `vector_forward` whose memory accesses are drawn, as a constant for templates; checked against the plan.
// Included by the pictures of memory, after device_code.hpp.
#pragma once

#include "tools/pictures/device_code.hpp"
#include "tools/pictures/plans.hpp"

namespace tessera::pictures {

inline constexpr ladder::Config drawn_tile{.threads = 128,
                                         .D = 64,
                                         .Dv = 64,
                                         .block_rows = 128,
                                         .block_cols = 64,
                                         .rows_per_thread = 4,
                                         .stages = 1,
                                         .blocks_per_sm = 2,
                                         .tensor_cores = true,
                                         .wide_loads = true};

inline void check_drawn_tile() {
  const gpu::Step planned = step_of(steps_of("vector", drawn_problem(Pass::forward)), "vector_forward");
  const ladder::Function function{"vector_forward", "vector_forward", "ForwardParams"};
  if (planned.unit != ladder::step(function, drawn_tile, 1).unit)
    throw std::runtime_error("drawn_tile.hpp: the planner has come to choose another tile");
}

}  // namespace tessera::pictures
