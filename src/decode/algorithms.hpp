// SPDX-License-Identifier: Apache-2.0
// `decode`: few queries over many keys, padded, packed or in pages, for NVIDIA GPUs from sm_80 on.
// Included by src/api/kernels.cpp and the tests. docs/gpu_kernels.md, "decode".
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "decode/config.hpp"
#include "decode/params.hpp"
#include "gpu/step.hpp"

namespace tessera::decode {

// `decode_direct`, where work items are few enough for blocks to find them themselves; then `decode_queue`: the same
// bits.
std::vector<gpu::Algorithm> algorithms();

// For caches that the kernels of other families for many rows do not take, so they come behind those: `decode_many`,
// the same launches for any number of rows.
std::vector<gpu::Algorithm> fallbacks();

// Launches for the sequences of at most gpu::few_rows rows, of a call whose others are another family's: a
// gpu::AddSteps. The steps' score_scale must be the one that `decode` would have.
void add_few_rows(gpu::Steps& steps, const Problem& problem, const cuda::Target& target);

// Rows of the problem's longest sequence: queries times the heads of a KV head.
std::int64_t rows_of(const Problem& problem);

// None: no tile of so many rows, or of fewer, fits into the GPU's shared memory.
std::optional<Config> tile_of(const Problem& problem, const cuda::Target& target, bool direct = false);

std::string attend_unit_text(const Config& config);

// What the plan's workspace holds, from upper bounds alone: at `base`, or anywhere. `bytes`: of all.
struct Carved {
  Memory memory;
  std::int64_t blocks;  // of the attention kernel
  std::int64_t bytes;
};
Carved carve(const Problem& problem, const cuda::Target& target, const Config& config, std::byte* base);

}  // namespace tessera::decode
