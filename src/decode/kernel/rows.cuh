// SPDX-License-Identifier: Apache-2.0
// What a block of the `decode` kernel copies: its rows of Q, and tiles of K and V by cp.async, from rows that are
// evenly apart or in pages. What no row of the work item sees, and what the tensors lack, becomes 0, so that nothing
// beyond a sequence enters a product. Device code.
#pragma once

#include "decode/kernel/work.cuh"
#include "gpu/kernel/copy.cuh"

namespace tessera::decode {

template <Config config>
struct Rows {
  static constexpr Layout layout = layout_of(config);
  static constexpr int R = config.rows, T = config.tile_keys;

  const Params& p;
  unsigned char* const memory;
  const Work& w;

  __device__ Rows(const Params& p, unsigned char* memory) :
      p(p), memory(memory), w(*reinterpret_cast<const Work*>(memory + layout.work)) {}

  template <class Thing>
  __device__ Thing* shared(int offset) const {
    return reinterpret_cast<Thing*>(memory + offset);
  }
  __device__ UInt32 address(int offset) const { return gpu::shared_address(memory) + offset; }

  // --- rows of K and V: where they are, and their copies

  // Where the row of a key begins, in elements, of K (side 0) or V. Nowhere: no row of the item sees it, or it is in no
  // page. Strides may be negative, and places too.
  static constexpr Int64 nowhere = Int64(1) << 62;
  __device__ Int64 place_of(Int32 key, int side) const {
    if (key < w.begin || key >= w.end) return nowhere;
    const gpu::TokenRef& t = side ? p.call.x.v : p.call.x.k;
    const Int64 of_head = w.item.kv * t.head;
    if constexpr (!config.paged) {
      return w.item.b * t.batch + (w.k_first + key) * t.token + of_head;
    } else {
      const gpu::PageTable& table = side ? p.pages.v : p.pages.k;
      const UInt32 place = UInt32(w.k_first) + UInt32(key), number = place / UInt32(p.pages.size);
      const Int64 page = table.entries[(side ? w.v_entry : w.k_entry) + number * table.entry];
      if (page < 0 || page >= table.pages) {
        if (p.pages.status) atomicOr(p.pages.status, 1);
        return nowhere;
      }
      return page * t.batch + (place - number * UInt32(p.pages.size)) * t.token + of_head;
    }
  }
  // A thread finds one row of a tile: of K's, or of V's.
  __device__ Int64 find_row(Int32 tile) const {
    const int row = threadIdx.x % T, side = threadIdx.x / T;
    return side < 2 ? place_of(tile * T + row, side) : nowhere;
  }
  __device__ void keep_row(Int32 tile, Int64 place) const {
    if (threadIdx.x < 2 * T) shared<Int64>(layout.places)[tile % config.stages * 2 * T + threadIdx.x] = place;
  }

  // The existing bytes of a chunk of 16 that begins at a column.
  __device__ static int bytes_at(int column, int width) {
    if constexpr (config.whole) return 16;
    const int left = 2 * (width - column);
    return left < 0 ? 0 : left < 16 ? left : 16;
  }
  template <int rows, int width>
  __device__ void copy_row(UInt32 to, int row, const UInt16* from, bool exists, int real_width) const {
#pragma unroll
    for (int first = 0; first < width; first += gpu::panel_columns) {
      const int column = first + gpu::copy_column(threadIdx.x), bytes = exists ? bytes_at(column, real_width) : 0;
      gpu::copy_async<16>(to + gpu::tile_byte(rows, row, column), from + (bytes > 0 ? column : 0), bytes);
    }
  }
  template <int width>
  __device__ void copy_side(UInt32 to, const gpu::TokenRef& t, const Int64* places, int real_width) const {
    const auto* base = static_cast<const UInt16*>(t.data);
#pragma unroll
    for (int r = 0; r < T; r += gpu::copy_rows_at_once(threads)) {
      const int row = r + gpu::copy_row(threadIdx.x);
      const Int64 place = places[row];
      copy_row<T, width>(to, row, base + (place == nowhere ? 0 : place), place != nowhere, real_width);
    }
  }
  // K and V of a tile whose rows are known.
  __device__ void copy_tile(Int32 tile) const {
    const int stage = tile % config.stages;
    const Int64* places = shared<const Int64>(layout.places) + stage * 2 * T;
    copy_side<config.D>(address(layout.K + stage * layout.k_bytes), p.call.x.k, places, p.D);
    copy_side<config.Dv>(address(layout.V + stage * layout.v_bytes), p.call.x.v, places + T, p.Dv);
  }
  __device__ void copy_Q() const {
    for (int r = gpu::copy_row(threadIdx.x); r < R; r += gpu::copy_rows_at_once(threads)) {
      const bool exists = r < w.rows.count;
      const Int32 row = w.rows.first + (exists ? r : 0);
      const auto* from = gpu::row_of<config.element>(p.call.x.q, w.item.b, w.q_begin + row / p.group,
                                                     w.item.kv * p.group + row % p.group);
      copy_row<R, config.D>(address(layout.Q), r, &from->bits, exists, p.D);
    }
  }
};

}  // namespace tessera::decode
