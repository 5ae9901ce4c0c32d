// SPDX-License-Identifier: Apache-2.0
// Tiles of rows, from global to shared memory: cp.async where rows are aligned, plain loads where they are not. Columns
// and rows that the tensor lacks become 0, so that nothing beyond a sequence ever enters a product. Device code.
#pragma once

#include "gpu/kernel/copy.cuh"
#include "gpu/kernel/eight_bits.cuh"
#include "gpu/kernel/math.cuh"
#include "gpu/kernel/matrix.cuh"
#include "mma/config.hpp"
#include "mma/layout.hpp"

namespace tessera::mma {

using gpu::chunk_columns;
using gpu::commit_copies, gpu::copy_async, gpu::shared_address, gpu::wait_copies;
using gpu::load_four, gpu::load_number, gpu::load_two, gpu::store_chunk, gpu::store_four, gpu::store_number,
    gpu::store_pair;

// One chunk of 16 bytes, of which the first `bytes` exist.
template <auto config>
__device__ inline void copy_chunk(UInt32 to, const UInt16* from, int bytes) {
  if constexpr (config.copy_bytes == 16 && !config.turing) {
    copy_async<16>(to, from, bytes);
  } else if constexpr (config.copy_bytes > 2 && !config.turing) {
    constexpr int size = config.copy_bytes;
#pragma unroll
    for (int at = 0; at < 16; at += size)
      copy_async<size>(to + at, from + at / 2, bytes < at ? 0 : bytes - at < size ? bytes - at : size);
  } else {
    uint4 x{0, 0, 0, 0};
    if constexpr (config.copy_bytes == 16) {
      if (bytes == 16) return store_chunk(to, *reinterpret_cast<const uint4*>(from));
    }
    UInt32 pairs[4] = {};
#pragma unroll
    for (int n = 0; n < 8; ++n)
      if (2 * n < bytes) pairs[n / 2] |= UInt32(from[n]) << n % 2 * 16;
    x = {pairs[0], pairs[1], pairs[2], pairs[3]};
    store_chunk(to, x);
  }
}

// A tile's copy by all threads of the block, in parts: a chunk of every thread each, which may be issued one by one
// between products. Rows of `width` columns; `valid` rows and `columns` columns exist.
template <auto config, int rows, int width>
struct TileCopy {
  static constexpr int step = copy_rows_at_once(threads_of(config));
  static constexpr int panels = (width + gpu::panel_columns - 1) / gpu::panel_columns;
  static constexpr int parts = (rows + step - 1) / step * panels;

  const UInt16* from;  // this thread's chunk of the first part
  Int64 advance;       // from it to that of the next rows
  UInt32 to;
  int valid, columns;  // from this thread's chunk on

  __device__ TileCopy(UInt32 tile, const UInt16* rows_at, Int64 distance, int valid, int columns) :
      TileCopy(tile, chunk_of(rows_at, distance, threadIdx.x), step * distance, valid, columns, threadIdx.x) {}
  // The same from the address of a thread's first chunk.
  __device__ TileCopy(UInt32 tile, const UInt16* from, Int64 advance, int valid, int columns, int thread) :
      from(from), advance(advance), to(tile + gpu::tile_byte(rows, copy_row(thread), copy_column(thread))),
      valid(valid - copy_row(thread)), columns(columns - copy_column(thread)) {}
  __device__ static const UInt16* chunk_of(const UInt16* rows_at, Int64 distance, int thread) {
    return rows_at + copy_row(thread) * distance + copy_column(thread);
  }

  // Parts in their order: the address is incremented row by row, which is cheaper than computing it.
  __device__ void issue(int part) {
    const int r = part / panels * step, first = part % panels * gpu::panel_columns;
    const UInt16* const chunk = from + first;
    if (part % panels == panels - 1) from += advance;
    if (rows % step != 0 && copy_row(threadIdx.x) + r >= rows) return;
    if (width % gpu::panel_columns != 0 && copy_column(threadIdx.x) + first >= width) return;
    int bytes = 16;
    if constexpr (!config.whole) {
      const int left = 2 * (columns - first);
      bytes = left < 0 ? 0 : left < 16 ? left : 16;
    }
    copy_chunk<config>(to + (part % panels * rows + r) * gpu::panel_row_bytes, chunk, r < valid ? bytes : 0);
  }
  __device__ void issue_all() {
#pragma unroll
    for (int part = 0; part < parts; ++part) issue(part);
  }
};

// The same of rows that lie anywhere. Of the rows that a warp copies, each lane knows the place of one, and tells the
// lanes that copy its chunks: a place is found once for 32 threads, and needs neither shared memory nor a barrier.
template <auto config, int rows, int width, Element type>
struct ScatteredCopy {
  using Even = TileCopy<config, rows, width>;
  static constexpr int step = Even::step, panels = Even::panels, parts = Even::parts;
  static constexpr int warp_rows = copy_rows_at_once(32);  // at a time
  static_assert(parts / panels * warp_rows <= 32, "a lane knows one place");

  // A row's first element, counted from the tensor's. Strides may be negative, and places too.
  static constexpr Int64 nowhere = Int64(1) << 62;
  // The row of the tile whose place a lane knows; there may be none.
  __device__ static int known_row(int thread) {
    const int lane = thread % 32;
    return lane / warp_rows * step + thread / 32 * warp_rows + lane % warp_rows;
  }

  static constexpr bool bytes_wide = type == Element::e4m3 || type == Element::i8;

  const void* tensor;
  Int64 place;  // of the row that this lane knows
  UInt32 tile;
  int columns;          // of the tensor
  int thread;           // gpu::recomputed: nothing that follows from it is kept from tile to tile
  Int64 row = nowhere;  // that this thread copies a chunk of

  __device__ ScatteredCopy(UInt32 tile, const void* tensor, Int64 place, int columns) :
      tensor(tensor), place(place), tile(tile), columns(columns), thread(gpu::recomputed(threadIdx.x)) {}

  // Parts in their order, by all lanes of a warp: numbers of 16 bits.
  __device__ void issue(int part) {
    find_row(part);
    const auto* from = static_cast<const UInt16*>(tensor);
    const int count = existing(part), column = column_of(part);
    if (has(part)) copy_chunk<config>(address(part), from + (count > 0 ? row + column : 0), 2 * count);
  }

  // Numbers of 8 bits are converted on their way: every one of them is one of f16 and of bf16, too. Some loads at a
  // time, so that their latencies overlap; none is asynchronous.
  struct alignas(8) Bytes {
    UInt32 x[2];
  };
  __device__ Bytes load(int part) {
    find_row(part);
    const auto* from = static_cast<const unsigned char*>(tensor) + (row == nowhere ? 0 : row + column_of(part));
    const int count = has(part) ? existing(part) : 0;
    Bytes out{};
    if (config.copy_bytes >= 8 && count == chunk_columns) return *reinterpret_cast<const Bytes*>(from);
#pragma unroll
    for (int n = 0; n < chunk_columns; ++n)
      if (n < count) out.x[n / 4] |= UInt32(from[n]) << n % 4 * 8;
    return out;
  }
  __device__ void convert(int part, const Bytes& bytes) const {
    if (!has(part)) return;
    UInt32 pairs[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const UInt32 pair = n % 2 ? gpu::widened<type, true>(bytes.x[n / 2]) : gpu::widened<type, false>(bytes.x[n / 2]);
      pairs[n] = pair;
      if constexpr (config.element != Element::f16)
        pairs[n] = gpu::packed<config.element>(gpu::unpacked<Element::f16>(pair & 0xffffu),
                                               gpu::unpacked<Element::f16>(pair >> 16));
    }
    store_chunk(address(part), {pairs[0], pairs[1], pairs[2], pairs[3]});
  }

  __device__ void issue_all() {
    if constexpr (bytes_wide) {
      constexpr int at_once = 4;
#pragma unroll
      for (int first = 0; first < parts; first += at_once) {
        Bytes bytes[at_once];
#pragma unroll
        for (int n = 0; n < at_once; ++n)
          if (first + n < parts) bytes[n] = load(first + n);
#pragma unroll
        for (int n = 0; n < at_once; ++n)
          if (first + n < parts) convert(first + n, bytes[n]);
      }
    } else {
#pragma unroll
      for (int part = 0; part < parts; ++part) issue(part);
    }
  }

 private:
  __device__ int column_of(int part) const { return copy_column(thread) + part % panels * gpu::panel_columns; }
  __device__ int row_of(int part) const { return copy_row(thread) + part / panels * step; }
  __device__ void find_row(int part) {
    if (part % panels == 0) row = __shfl_sync(0xffffffffu, place, part / panels * warp_rows + copy_row(thread % 32));
  }
  // Whether the tile has such a chunk, and how many numbers of it the tensor has.
  __device__ bool has(int part) const {
    return (rows % step == 0 || row_of(part) < rows) && (width % gpu::panel_columns == 0 || column_of(part) < width);
  }
  __device__ int existing(int part) const {
    if (row == nowhere) return 0;
    const int left = columns - column_of(part);
    return config.whole || left > chunk_columns ? chunk_columns : left < 0 ? 0 : left;
  }
  __device__ UInt32 address(int part) const { return tile + gpu::tile_byte(rows, row_of(part), column_of(part)); }
};

// One number of 4 bytes; 0 unless it exists.
template <auto config>
__device__ inline void copy_number(UInt32 to, const float* from, bool exists) {
  if constexpr (config.turing)
    store_number(to, exists ? *from : 0);
  else
    copy_async<4>(to, from, exists ? 4 : 0);
}

}  // namespace tessera::mma
