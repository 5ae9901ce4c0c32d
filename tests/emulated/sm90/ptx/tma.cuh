// SPDX-License-Identifier: Apache-2.0
// Stands in for src/sm90/ptx/tma.cuh on the host: copies happen at once, swizzled as sm90_test shows, rows beyond the
// tensor zero or left out. A tensor map's words are set by `emulated_map`, or by the fake driver, which has the same
// (EncodedMap of tests/fake/machine.hpp).
#pragma once

#include "core/tensor.hpp"
#include "sm90/layout.hpp"
#include "sm90/params.hpp"
#include "sm90/ptx/barrier.cuh"

namespace tessera::sm90 {

inline constexpr UInt64 keep_in_cache = 0, pass_through_cache = 0;

// A [B,N,H,D] or packed [T,H,D] tensor of 16-bit elements; boxes of `rows` tokens. Words: the address, the sizes of
// columns, tokens, heads and sequences, the strides of the last three in bytes, the box's columns and, in the upper
// half, its rows. Strides are as tensor copies demand.
inline TensorMap emulated_map(const Tensor& t, int rows) {
  const int token = t.ndim - 3, head = t.ndim - 2;
  const auto size = [&](int dim) { return UInt64(t.shape[std::size_t(dim)]); };
  const Int64 strides[] = {stride(t, token), stride(t, head), t.ndim == 4 ? stride(t, 0) : 0};
  for (const Int64 elements : strides)
    if (elements % 8 != 0) throw std::runtime_error("a stride of a tensor map is no multiple of 16 bytes");
  if (reinterpret_cast<UInt64>(t.data) % 16 != 0) throw std::runtime_error("a tensor map's address is not aligned");
  return {{reinterpret_cast<UInt64>(t.data), size(t.ndim - 1), size(token), size(head), t.ndim == 4 ? size(0) : 1,
           UInt64(strides[0]) * 2, UInt64(strides[1]) * 2, UInt64(strides[2]) * 2, UInt64(rows) << 32 | 64}};
}

// What a tensor map says of tensor and box.
struct Mapped {
  const TensorMap& map;
  UInt16* data() const { return reinterpret_cast<UInt16*>(map.words[0]); }
  Int64 size(int dim) const { return Int64(map.words[1 + dim]); }
  Int64 stride(int dim) const { return Int64(map.words[4 + dim]) / 2; }  // of all but columns
  int rows() const { return int(map.words[8] >> 32); }
};

struct TilePlace {
  int token, head, sequence;
};

// Calls f(element of the tensor or null, its byte in the tile) for all of a tile.
template <int rows, int panels, class Function>
void for_tile(const TensorMap& map, const TilePlace& at, Function f) {
  const Mapped m{map};
  const Int64 columns = m.size(0), tokens = m.size(1);
  if (m.rows() != rows) throw std::runtime_error("the tensor map's box has other rows than the tile");
  if (at.head < 0 || at.head >= m.size(2) || at.sequence < 0 || at.sequence >= m.size(3))
    throw std::runtime_error("a tile of a head or a sequence that does not exist");
  for (int row = 0; row < rows; ++row)
    for (int column = 0; column < 64 * panels; ++column) {
      const Int64 token = at.token + row;
      const bool inside = token >= 0 && token < tokens && column < columns;
      f(inside ? m.data() + token * m.stride(1) + at.head * m.stride(2) + at.sequence * m.stride(3) + column : nullptr,
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

// Swizzled by the address in shared memory, whichever row of a tile it is. Outside of the tensor all is zero.
template <int rows, int panels>
void load_piece(UInt32 to, const TensorMap& map, const Barrier& barrier, const TilePlace& at, int piece_rows, UInt64) {
  const Mapped of{map};
  if (of.rows() != piece_rows) throw std::runtime_error("the tensor map's box has other rows than the piece");
  if (to % 128 != 0) throw std::runtime_error("a tensor copy's place in shared memory is not aligned");
  Machine& m = Machine::here();
  for (int panel = 0; panel < panels; ++panel) {
    const UInt32 first = to + UInt32(panel * rows * panel_row_bytes);
    m.copy_in(barrier.model(), first, piece_rows * panel_row_bytes, [&] {
      for (int row = 0; row < piece_rows; ++row)
        for (int column = 0; column < panel_columns; ++column) {
          const Int64 place[] = {panel * panel_columns + column, at.token + row, at.head, at.sequence};
          bool inside = true;
          Int64 element = place[0];
          for (int n = 0; n < 4; ++n) inside = inside && place[n] >= 0 && place[n] < of.size(n);
          for (int n = 1; n < 4; ++n) element += place[n] * of.stride(n);
          const UInt16 value = inside ? of.data()[element] : UInt16(0);
          const UInt32 line = first + UInt32(row * panel_row_bytes), chunk = UInt32(column / chunk_columns);
          const UInt32 byte = (chunk ^ (line / panel_row_bytes & 7)) * chunk_bytes + UInt32(column % chunk_columns * 2);
          std::memcpy(m.memory + line + byte, &value, 2);
        }
    });
    barrier.complete(piece_rows * panel_row_bytes);
  }
}

template <int bytes>
void load_bytes(UInt32 to, const void* from, const Barrier& barrier) {
  Machine& m = Machine::here();
  m.copy_in(
      barrier.model(), to, bytes, [&] { std::memcpy(m.memory + to, from, bytes); }, from);
  barrier.complete(bytes);
}

template <int rows, int panels>
void store_tile(const TensorMap& map, UInt32 from, const TilePlace& at) {
  const unsigned char* tile = Machine::here().memory + from;
  if (map.words[1] % 8 != 0) throw std::runtime_error("a tensor copy would write whole 16 bytes, beyond the row's end");
  const auto for_elements = [&](const auto& f) {
    for_tile<rows, panels>(map, at, [&](UInt16* element, int byte) {
      if (element) f(element, byte);
    });
  };
  Machine::here().copy_out(
      from, rows * panels * 128,
      [&] { for_elements([&](UInt16* element, int byte) { std::memcpy(element, tile + byte, 2); }); },
      [&](const auto& look) {
        for_elements([&](UInt16* element, int) { look(element, 2, emulated::Access::write); });
      });
}

template <int bytes>
void store_bytes(void* to, UInt32 from) {
  Machine& m = Machine::here();
  m.copy_out(
      from, bytes, [&] { std::memcpy(to, m.memory + from, bytes); },
      [&](const auto& look) { look(to, bytes, emulated::Access::write); });
}
template <int bytes>
void add_floats(float* to, UInt32 from) {
  const auto* numbers = reinterpret_cast<const float*>(Machine::here().memory + from);
  Machine::here().copy_out(
      from, bytes,
      [&] {
        for (int n = 0; n < bytes / 4; ++n) to[n] += numbers[n];
      },
      [&](const auto& look) { look(to, bytes, emulated::Access::atomic); });
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

inline void wait_stores_read() { Machine::here().wait_stores_read(); }
inline void wait_stores() { Machine::here().wait_stores(); }
inline void publish_shared() { Machine::here().publish(); }
inline void publish_global() { Machine::here().publish_global(); }
inline void prefetch(const TensorMap&) {}

}  // namespace tessera::sm90
