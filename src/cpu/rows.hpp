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

// Where the rows of neighbouring keys are: rows[r] is that of the r-th. False: some entry is outside of the pool, and
// what it stands for are zeros.
template <Int64 most>
TESSERA_ALWAYS_INLINE bool find_key_rows(const KeyRows& source, Range keys, const char* (&rows)[most]) {
  if (source.table) return source.find(keys, rows);
  // All of them, whether there is a key or not: a loop of constant length is a few vector instructions. Addresses of
  // rows that do not exist may wrap around.
  const auto first = __builtin_bit_cast(UInt64, source.row(keys.begin)), step = UInt64(source.stride);
  for (UInt64 r = 0; r < UInt64(most); ++r) rows[r] = __builtin_bit_cast(const char*, first + r * step);
  return true;
}

// Neighbouring keys, at most `most` of them: row r is that of the r-th. They may lie in several pages.
template <Int64 most>
struct KeyTile {
  Type type;
  bool scaled;
  const char* rows[most];
  Int64 groups;                           // of dims with a scale of their own; 1 if there are none
  float scales[most_scale_groups][most];  // if scaled; 1 behind the last key

  TESSERA_ALWAYS_INLINE const char* row(Int64 r) const { return rows[r]; }
  TESSERA_ALWAYS_INLINE float scale(Int64 r, Int64 group) const { return scaled ? scales[group][r] : 1; }

  TESSERA_ALWAYS_INLINE void find(const KeyRows& source, Range keys) {
    type = source.type, scaled = source.scales != nullptr, groups = source.scale_groups;
    find_key_rows(source, keys, rows);
    for (Int64 g = 0; g < groups && scaled; ++g) {
      source.find_scales(keys, g, scales[g]);
      for (Int64 r = keys.size(); r < most; ++r) scales[g][r] = 1;
    }
  }
};

}  // namespace tessera::cpu
