// SPDX-License-Identifier: Apache-2.0
// The mask: which key j a query i sees, and what follows for tiles of queries and keys, forward and transposed.
// Shared by every backend as constexpr text; the reference may use only visible(), which is the definition, so that a
// mistake in the ranges cannot hide (tests/unit/mask_test.cpp compares them exhaustively). Implements
// docs/algorithm.md, "Mask".
#pragma once

#include "math/types.hpp"

namespace tessera {

// Everything about visibility that depends on positions alone: j - i lies in [low, high], and j < keys.
// (The boolean mask tensor comes on top, element by element.)
struct BandMask {
  static constexpr Int64 unbounded = Int64(1) << 60;
  Int64 low = -unbounded;
  Int64 high = unbounded;
  Int64 keys = 0;  // Nk_b
  Int64 rows = 0;  // Nq_b

  constexpr bool visible(Int64 i, Int64 j) const { return j < keys && low <= j - i && j - i <= high; }
};

struct Range {
  Int64 begin = 0;
  Int64 end = 0;
  constexpr bool empty() const { return begin >= end; }
  constexpr Int64 size() const { return empty() ? 0 : end - begin; }
};

enum class TileClass { empty, partial, full };

// A sum of positions from a caller, who may pass any int64: held well inside the range.
constexpr Int64 bounded(Int64 x) { return clamp(x, -BandMask::unbounded, BandMask::unbounded); }

// `off` of one sequence. alignment: 0 bottom right, 1 top left, 2 the caller's own; as tessera_alignment.
constexpr Int64 diagonal_offset(int alignment, Int64 rows, Int64 keys, Int64 own) {
  return alignment == 0 ? keys - rows : alignment == 1 ? 0 : own;
}

// Where the diagonal lies, relative to positions inside the sequence: j - i = off + row0 - col0.
constexpr Int64 diagonal_shift(Int64 off, Int64 row0, Int64 col0) {
  return bounded(bounded(bounded(off) + bounded(row0)) - bounded(col0));
}

// From the options to the band. `off` is the diagonal's offset of this sequence; row0 and col0 are added to i and j.
// Causal: j + col0 <= i + row0 + off. Window: i + row0 + off - left <= j + col0 <= i + row0 + off + right.
constexpr BandMask band_mask(Int64 rows, Int64 keys, bool causal, Int64 window_left, Int64 window_right, Int64 off,
                             Int64 row0, Int64 col0) {
  BandMask mask{.keys = keys, .rows = rows};
  const Int64 shift = diagonal_shift(off, row0, col0);
  if (window_left >= 0) mask.low = bounded(shift - bounded(window_left));
  if (window_right >= 0) mask.high = bounded(shift + bounded(window_right));
  if (causal) mask.high = lesser(mask.high, shift);
  return mask;
}

// The keys that some query of `queries` sees; everything outside is invisible to all of them.
constexpr Range visible_keys(const BandMask& mask, Range queries) {
  if (queries.empty()) return {};
  return {clamp(queries.begin + mask.low, 0, mask.keys), clamp(queries.end - 1 + mask.high + 1, 0, mask.keys)};
}

// Transposed: the queries that see some key of `keys`.
constexpr Range visible_queries(const BandMask& mask, Range keys) {
  const Int64 last = lesser(keys.end, mask.keys) - 1;
  if (last < keys.begin) return {};
  return {clamp(keys.begin - mask.high, 0, mask.rows), clamp(last - mask.low + 1, 0, mask.rows)};
}

// Does every query of the tile see every key of it, none any, or some some?
constexpr TileClass tile_class(const BandMask& mask, Range queries, Range keys) {
  if (queries.empty() || keys.empty() || keys.begin >= mask.keys) return TileClass::empty;
  const Int64 smallest = keys.begin - (queries.end - 1);  // of j - i
  const Int64 largest = keys.end - 1 - queries.begin;
  const Int64 largest_used = lesser(keys.end, mask.keys) - 1 - queries.begin;
  if (largest_used < mask.low || smallest > mask.high) return TileClass::empty;
  if (keys.end <= mask.keys && mask.low <= smallest && largest <= mask.high) return TileClass::full;
  return TileClass::partial;
}

}  // namespace tessera
