// SPDX-License-Identifier: Apache-2.0
// Where rows lie in memory, as the CPU kernels see it: those of a head's queries and outputs, and those of the keys of
// a tile. Included by cpu/kernel_jobs.hpp; functions are part of their callers, since these are compiled for several
// instruction sets.
#pragma once

#include "core/key_rows.hpp"
#include "core/limits.hpp"
#include "math/types.hpp"
#include "tessera/types.hpp"

namespace tessera::cpu {

// Rows of one head of one sequence, evenly apart: row i begins at base + i * stride bytes.
struct Rows {
  Type type = Type::f32;
  char* base = nullptr;
  Int64 stride = 0;

  TESSERA_ALWAYS_INLINE char* row(Int64 i) const { return base + i * stride; }
  explicit operator bool() const { return base != nullptr; }
};

inline constexpr Int64 most_scale_groups = ceil_div(most_dims, scale_width);

// Neighbouring keys, at most `most` of them: row r is that of the r-th. They may lie in several pages.
template <Int64 most>
struct KeyTile {
  Type type;
  bool scaled, in_pool;  // in_pool: the rows are those of pages
  const char* base;      // the source's
  const char* rows[most];
  Int64 groups;                           // of dims with a scale of their own; 1 if there are none
  float scales[most_scale_groups][most];  // if scaled; 1 behind the last key

  TESSERA_ALWAYS_INLINE const char* row(Int64 r) const { return rows[r]; }
  TESSERA_ALWAYS_INLINE float scale(Int64 r, Int64 group) const { return scaled ? scales[group][r] : 1; }

  TESSERA_ALWAYS_INLINE void find(const KeyRows& source, Range keys) {
    find_rows(source, keys);
    load_scales(source, keys);
  }

  TESSERA_ALWAYS_INLINE void find_rows(const KeyRows& source, Range keys) {
    type = source.type, base = source.base;
    if (source.table) {
      in_pool = source.find(keys, rows);
      return;
    }
    in_pool = false;
    // All of them, whether there is a key or not: a loop of constant length is a few vector instructions. Addresses of
    // rows that do not exist may wrap around.
    const auto first = __builtin_bit_cast(UInt64, source.row(keys.begin)), step = UInt64(source.stride);
    for (UInt64 r = 0; r < UInt64(most); ++r) rows[r] = __builtin_bit_cast(const char*, first + r * step);
  }

  TESSERA_ALWAYS_INLINE void load_scales(const KeyRows& source, Range keys) {
    scaled = source.scales != nullptr, groups = source.scale_groups;
    for (Int64 g = 0; g < groups && scaled; ++g) {
      source.find_scales(keys, g, scales[g]);
      for (Int64 r = keys.size(); r < most; ++r) scales[g][r] = 1;
    }
  }

  // As find(), where `other` holds the same keys of another head: in a page, heads lie evenly apart.
  TESSERA_ALWAYS_INLINE void find_beside(const KeyTile& other, const KeyRows& source, Range keys) {
    if (!other.in_pool) return find(source, keys);
    type = source.type, base = source.base, in_pool = true;
    for (Int64 r = 0; r < keys.size(); ++r) rows[r] = other.rows[r] + (source.base - other.base);
    load_scales(source, keys);
  }
};

}  // namespace tessera::cpu
