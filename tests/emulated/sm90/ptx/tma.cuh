// SPDX-License-Identifier: Apache-2.0
// Stands in for src/sm90/ptx/tma.cuh on the host: copies happen at once, swizzled as sm90_test shows, rows beyond the
// tensor zero or left out. A tensor map's words are set by `emulated_map`.
#pragma once

#include "core/tensor.hpp"
#include "sm90/layout.hpp"
#include "sm90/params.hpp"
#include "sm90/ptx/barrier.cuh"

namespace tessera::sm90 {

inline constexpr UInt64 keep_in_cache = 0, pass_through_cache = 0;

// A [B,N,H,D] or packed [T,H,D] tensor of 16-bit elements; boxes of `rows` tokens. Words: the address, the sizes of
// columns, tokens, heads and sequences, the strides of the last three, the rows. Strides are as tensor copies demand.
inline TensorMap emulated_map(const Tensor& t, int rows) {
  const int token = t.ndim - 3, head = t.ndim - 2;
  const auto size = [&](int dim) { return UInt64(t.shape[std::size_t(dim)]); };
  const Int64 strides[] = {stride(t, token), stride(t, head), t.ndim == 4 ? stride(t, 0) : 0};
  for (const Int64 elements : strides)
    if (elements % 8 != 0) throw std::runtime_error("a stride of a tensor map is no multiple of 16 bytes");
  if (reinterpret_cast<UInt64>(t.data) % 16 != 0) throw std::runtime_error("a tensor map's address is not aligned");
  return {{reinterpret_cast<UInt64>(t.data), size(t.ndim - 1), size(token), size(head), t.ndim == 4 ? size(0) : 1,
           UInt64(strides[0]), UInt64(strides[1]), UInt64(strides[2]), UInt64(rows)}};
}

struct TilePlace {
  int token, head, sequence;
};

// Calls f(element of the tensor or null, its byte in the tile) for all of a tile.
template <int rows, int panels, class Function>
void for_tile(const TensorMap& map, const TilePlace& at, Function f) {
  auto* data = reinterpret_cast<UInt16*>(map.words[0]);
  const auto word = [&](int n) { return Int64(map.words[n]); };
  const Int64 columns = word(1), tokens = word(2);
  if (word(8) != rows) throw std::runtime_error("the tensor map's box has other rows than the tile");
  if (at.head < 0 || at.head >= word(3) || at.sequence < 0 || at.sequence >= word(4))
    throw std::runtime_error("a tile of a head or a sequence that does not exist");
  for (int row = 0; row < rows; ++row)
    for (int column = 0; column < 64 * panels; ++column) {
      const Int64 token = at.token + row;
      const bool inside = token >= 0 && token < tokens && column < columns;
      f(inside ? data + token * word(5) + at.head * word(6) + at.sequence * word(7) + column : nullptr,
        tile_byte(rows, row, column));
    }
}

template <int rows, int panels>
void load_tile(UInt32 to, const TensorMap& map, const Barrier& barrier, const TilePlace& at, UInt64) {
  unsigned char* tile = Machine::here().memory + to;
  Machine::here().copy_in(barrier.model(), to, rows * panels * 128, [&] {
    for_tile<rows, panels>(map, at, [&](UInt16* element, int byte) {
      const UInt16 value = element ? *element : UInt16(0);
      std::memcpy(tile + byte, &value, 2);
    });
  });
  barrier.complete(rows * panels * 128);
}

template <int bytes>
void load_bytes(UInt32 to, const void* from, const Barrier& barrier) {
  Machine& m = Machine::here();
  m.copy_in(barrier.model(), to, bytes, [&] { std::memcpy(m.memory + to, from, bytes); });
  barrier.complete(bytes);
}

template <int rows, int panels>
void store_tile(const TensorMap& map, UInt32 from, const TilePlace& at) {
  const unsigned char* tile = Machine::here().memory + from;
  if (map.words[1] % 8 != 0) throw std::runtime_error("a tensor copy would write whole 16 bytes, beyond the row's end");
  Machine::here().copy_out(from, rows * panels * 128, [&] {
    for_tile<rows, panels>(map, at, [&](UInt16* element, int byte) {
      if (element) std::memcpy(element, tile + byte, 2);
    });
  });
}

template <int bytes>
void store_bytes(void* to, UInt32 from) {
  Machine& m = Machine::here();
  m.copy_out(from, bytes, [&] { std::memcpy(to, m.memory + from, bytes); });
}
template <int bytes>
void add_floats(float* to, UInt32 from) {
  const auto* numbers = reinterpret_cast<const float*>(Machine::here().memory + from);
  Machine::here().copy_out(from, bytes, [&] {
    for (int n = 0; n < bytes / 4; ++n) to[n] += numbers[n];
  });
}

inline void store_four(UInt32 to, const float* x) { Machine::here().store(to, x, 16); }
inline void clear_chunk(UInt32 at) {
  const unsigned char zeros[16] = {};
  Machine::here().store(at, zeros, 16);
}
inline UInt16 load_element(UInt32 from) {
  UInt16 x;
  Machine::here().load(&x, from, 2);
  return x;
}

inline void wait_stores_read() { Machine::here().wait_stores(); }
inline void wait_stores() { Machine::here().wait_stores(); }
inline void publish_shared() { Machine::here().publish(); }
inline void prefetch(const TensorMap&) {}

}  // namespace tessera::sm90
