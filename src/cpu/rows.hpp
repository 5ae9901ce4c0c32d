// Where rows lie in memory, as the CPU kernels see it: those of a head's queries and outputs, and those of its keys.
// The only place that knows how a key's number becomes an address. Included by cpu/kernel_jobs.hpp; functions are part
// of their callers, since these are compiled for several instruction sets.
#pragma once

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

// Neighbouring keys: row r is that of the r-th. Evenly apart as well, so a product may read them in place.
struct KeyTile {
  Type type = Type::f32;
  const char* base = nullptr;
  Int64 stride = 0;

  TESSERA_ALWAYS_INLINE const char* row(Int64 r) const { return base + r * stride; }
};

// K or V of one KV head of one sequence. Kernels ask for the row of a key, or for the tile that begins at a key, and
// read a tile no further than they were told that there are keys. Padded and packed tensors have all their keys evenly
// apart; a paged cache would look its table up here.
class KeyRows {
 public:
  Type type = Type::f32;

  constexpr KeyRows() = default;
  constexpr explicit KeyRows(const Rows& rows) : type(rows.type), base(rows.base), stride(rows.stride) {}

  TESSERA_ALWAYS_INLINE const char* row(Int64 j) const { return base + j * stride; }
  TESSERA_ALWAYS_INLINE KeyTile tile(Int64 j) const { return {type, row(j), stride}; }

 private:
  const char* base = nullptr;
  Int64 stride = 0;
};

}  // namespace tessera::cpu
