// SPDX-License-Identifier: Apache-2.0
// Merge on a GPU: one launch. Included by src/api; the tests ask for its parts, since the kernel's text runs without a
// GPU too. Implements docs/algorithm.md, "Merge".
#pragma once

#include <span>
#include <string>

#include "gpu/merge_params.hpp"
#include "tessera/types.hpp"

namespace tessera::gpu {

// Of a checked call. Enqueues, and returns.
void merge(std::span<const Outputs> partials, const Outputs& merged, const Execution& execution);

// --- its parts

std::string merge_refusal(std::span<const Outputs> partials, const Outputs& merged);  // empty: none
MergeParams merge_params(std::span<const Outputs> partials, const Outputs& merged);
std::string merge_unit_text();
std::int64_t merge_blocks(const MergeParams& params);

}  // namespace tessera::gpu
