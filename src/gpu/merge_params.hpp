// SPDX-License-Identifier: Apache-2.0
// What the kernel `merge` is given: partial results over disjoint sets of keys. Types are run-time numbers, so that one
// compiled kernel serves every call. Shared by host and device code. Implements docs/algorithm.md, "Merge".
#pragma once

#include "gpu/config.hpp"
#include "gpu/params.hpp"

namespace tessera::gpu {

struct MergePart {
  TokenRef o;
  RowRef lse;  // data null: of the merged result, not wanted
  Element type, unused;
};

inline constexpr int most_parts = 52;  // as many as a kernel's parameters hold
inline constexpr int merge_threads = 128;

struct MergeParams {
  MergePart parts[most_parts];
  MergePart merged;
  Int64 tokens;
  Int32 count, B, H, width;

  constexpr Int64 rows() const { return Int64(B) * tokens * H; }
};

}  // namespace tessera::gpu
