// SPDX-License-Identifier: Apache-2.0
// What the planners of the `mma` kernels share: reasons to refuse, sections of heads, and the planner that has a file
// of its own. Included by src/mma and the tests; docs/gpu_kernels.md, "mma".
#pragma once

#include <optional>
#include <string>

#include "gpu/step.hpp"
#include "mma/tiles.hpp"

namespace tessera::mma {

// Why these kernels cannot take the problem, by option, value and rule; empty: they may. `of`: the GPU's class.
std::string refusal(const Problem& problem, const cuda::Target& target, const TileClass* of);

// Heads that are worked on at the same time, of so many: a power of two that divides them, at most `most`.
int section_of(std::int64_t heads, std::int64_t most);

// `mma_one_pass`. Turns are passed on for so many tiles at once; nothing: as the planner finds best.
gpu::Steps one_pass_steps(const Problem& problem, const cuda::Target& target, std::optional<int> turn_tiles = {});

}  // namespace tessera::mma
