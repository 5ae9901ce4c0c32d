// Stands in for src/sm90/ptx/tma.cuh on the host: copies happen at once, swizzled as sm90_test shows, rows beyond the
// tensor zero or left out. A tensor map's words are set by `emulated_map`.
#pragma once

#include "sm90/layout.hpp"
#include "sm90/params.hpp"
#include "sm90/ptx/barrier.cuh"

namespace tessera::sm90 {

inline constexpr UInt64 keep_in_cache = 0, pass_through_cache = 0;

// [sequences, tokens, heads, columns] of 16-bit elements, contiguous; boxes of `rows` tokens.
inline TensorMap emulated_map(void* data, Int64 sequences, Int64 tokens, Int64 heads, Int64 columns, int rows) {
  return {{reinterpret_cast<UInt64>(data), UInt64(sequences), UInt64(tokens), UInt64(heads), UInt64(columns),
           UInt64(rows)}};
}

struct TilePlace {
  int token, head, sequence;
};

// Calls f(element of the tensor or null, its byte in the tile) for all of a tile.
template <int rows, int panels, class Function>
void for_tile(const TensorMap& map, const TilePlace& at, Function f) {
  auto* data = reinterpret_cast<UInt16*>(map.words[0]);
  const auto tokens = Int64(map.words[2]), heads = Int64(map.words[3]), columns = Int64(map.words[4]);
  if (int(map.words[5]) != rows) throw std::runtime_error("the tensor map's box has other rows than the tile");
  for (int row = 0; row < rows; ++row)
    for (int column = 0; column < 64 * panels; ++column) {
      const Int64 token = at.token + row;
      const bool inside = token < tokens && column < columns;
      f(inside ? data + ((at.sequence * tokens + token) * heads + at.head) * columns + column : nullptr,
        tile_byte(rows, row, column));
    }
}

template <int rows, int panels>
void load_tile(UInt32 to, const TensorMap& map, const Barrier& barrier, const TilePlace& at, UInt64) {
  unsigned char* tile = Machine::here().memory + to;
  for_tile<rows, panels>(map, at, [&](UInt16* element, int byte) {
    const UInt16 value = element ? *element : UInt16(0);
    std::memcpy(tile + byte, &value, 2);
  });
  barrier.complete(rows * panels * 128);
}

template <int rows, int panels>
void store_tile(const TensorMap& map, UInt32 from, const TilePlace& at) {
  const unsigned char* tile = Machine::here().memory + from;
  for_tile<rows, panels>(map, at, [&](UInt16* element, int byte) {
    if (element) std::memcpy(element, tile + byte, 2);
  });
}

inline void clear_chunk(UInt32 at) { std::memset(Machine::here().memory + at, 0, 16); }
inline UInt16 load_element(UInt32 from) {
  UInt16 x;
  std::memcpy(&x, Machine::here().memory + from, 2);
  return x;
}

inline void wait_stores_read() {}
inline void wait_stores() {}
inline void publish_shared() {}
inline void prefetch(const TensorMap&) {}

}  // namespace tessera::sm90
