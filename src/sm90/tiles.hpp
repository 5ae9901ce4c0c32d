// Which tile a Hopper kernel uses. Depends on head dims, types and options only, so that a sequence's bits do not
// depend on what it is batched with. Included by plan.cpp.
#pragma once

#include <optional>

#include "core/problem.hpp"
#include "sm90/backward_config.hpp"

namespace tessera::sm90 {

// The backward pass: the first that fits is taken, with the problem's types. Here for tests, which run device text that
// constants specialise.
inline constexpr BackwardConfig backward_tiles[] = {
    {.side = Side::queries, .D = 64, .Dv = 64, .warpgroups = 3, .block_columns = 96, .stages = 4, .drains = true},
    {.side = Side::queries, .D = 128, .Dv = 128, .warpgroups = 2, .block_columns = 112, .stages = 2},
    {.side = Side::keys, .D = 64, .Dv = 64, .warpgroups = 2, .block_columns = 96, .stages = 4},
    {.side = Side::keys, .D = 128, .Dv = 128, .warpgroups = 2, .block_columns = 64, .stages = 4, .drains = true},
};

// None: no tile has these head dims.
std::optional<Config> forward_tile(const Problem& problem);
std::optional<BackwardConfig> backward_tile(const Problem& problem, Side side);

}  // namespace tessera::sm90
