// SPDX-License-Identifier: Apache-2.0
// What each query of a sequence sees where that is not a band of one place per query: a tree of draft tokens, and
// positions of the caller's. Exact; Sequence::mask is then a band around it. Made by core/sequence.cpp, read by the
// reference and the CPU kernels; functions are part of their callers, since these are compiled for several instruction
// sets. Implements docs/algorithm.md, "Mask", the paragraphs on trees and positions.
#pragma once

#include "math/mask.hpp"
#include "math/types.hpp"

namespace tessera {

struct RowMask {
  // Query i stands at key place(i): at its own position, or on the diagonal.
  const Int32* positions = nullptr;
  Int64 position_stride = 0, part = 0;  // part: row0 - col0
  Int64 shift = 0;

  const Int32* tree = nullptr;  // bits of query i: word t / 32 is tree[i * row_stride + t / 32 * word_stride]
  Int64 row_stride = 0, word_stride = 0;
  Int64 tree_begin = 0;  // the key of bit 0

  bool causal = false;
  Int64 left = -1, right = -1;  // window; -1: no bound

  explicit constexpr operator bool() const { return positions || tree; }

  TESSERA_ALWAYS_INLINE Int64 place(Int64 i) const {
    return positions ? positions[i * position_stride] + part : i + shift;
  }
  TESSERA_ALWAYS_INLINE bool bit(Int64 i, Int64 t) const {
    return UInt32(tree[i * row_stride + t / 32 * word_stride]) >> (t % 32) & 1u;
  }

  // Of the keys of the sequence. A tree takes the place of `causal` for its own keys.
  TESSERA_ALWAYS_INLINE bool visible(Int64 i, Int64 j) const {
    const Int64 ahead = j - place(i);
    if (left >= 0 && -ahead > left) return false;
    if (right >= 0 && ahead > right) return false;
    return tree && j >= tree_begin ? bit(i, j - tree_begin) : !causal || ahead <= 0;
  }

  TESSERA_ALWAYS_INLINE bool sees_all(Range queries, Range keys) const {
    bool all = true;
    for (Int64 i = queries.begin; i < queries.end && all; ++i) {
      // Both ends decide about window and `causal`, and only a tree's keys differ among themselves.
      all = visible(i, keys.begin) && visible(i, keys.end - 1);
      const Int64 last_before = lesser(keys.end, tree ? tree_begin : keys.end) - 1;
      if (last_before >= keys.begin) all = all && visible(i, last_before);
      for (Int64 j = greater(keys.begin, tree_begin); tree && j < keys.end && all; ++j) all = visible(i, j);
    }
    return all;
  }
};

}  // namespace tessera
