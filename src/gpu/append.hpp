// SPDX-License-Identifier: Apache-2.0
// Append on a GPU: one launch. Included by src/api; the tests ask for its parts, since the kernel's text runs without a
// GPU too. Implements docs/algorithm.md, "Append".
#pragma once

#include <string>

#include "core/append.hpp"
#include "gpu/append_params.hpp"

namespace tessera::gpu {

// Enqueues, and returns. What GPUs do not take is refused: f64.
void append(const Appending& call, const Execution& execution);

// --- its parts

std::string append_refusal(const Appending& call);  // empty: none
AppendParams append_params(const Appending& call);
std::string append_unit_text();
std::int64_t append_blocks(const AppendParams& params);

}  // namespace tessera::gpu
