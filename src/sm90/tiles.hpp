// SPDX-License-Identifier: Apache-2.0
// Which tile a Hopper kernel uses. Depends on head dims, types and options only, so that a sequence's bits do not
// depend on what it is batched with. Included by plan.cpp.
#pragma once

#include <optional>

#include "core/problem.hpp"
#include "sm90/backward_config.hpp"

namespace tessera::sm90 {

// Where one sum over all dims would lose more than LSE's error bound allows, S is the sum of two products
// (docs/numerics.md, "Tensor cores").
bool halves_S(const Problem& problem);

// None: no tile has these head dims.
std::optional<Config> forward_tile(const Problem& problem);
std::optional<BackwardConfig> backward_tile(const Problem& problem, Side side);

}  // namespace tessera::sm90
