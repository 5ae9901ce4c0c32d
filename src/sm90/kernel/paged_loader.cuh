// SPDX-License-Identifier: Apache-2.0
// The producers of the Hopper forward kernel where keys lie in pages: a warp that copies tiles of Q and K into their
// rings by TMA, and one for V. Device code; implements docs/gpu_kernels.md, "Hopper", keys in pages.
#pragma once

#include "sm90/kernel/loader.cuh"

namespace tessera::sm90 {

template <Config config>
struct PagedLoader : Loader<config> {
  static constexpr Layout layout = layout_of(config);
  static constexpr int block = config.block_keys;
  using Loader<config>::shared, Loader<config>::slot, Loader<config>::k, Loader<config>::v;
  static_assert(boxes_suffice(config));

  const PagedParams& p;
  const int lane = threadIdx.x % 32;

  __device__ PagedLoader(const PagedParams& p, const Shared<config>& shared) : Loader<config>(p, shared), p(p) {}

  // Rows `row` to `end` - 1 of a tile lie in one page, from `place` on. Page -1, which is nowhere: of zeros.
  struct Piece {
    Int32 row, end, place, page;
  };

  // The lane's piece of tile n; there may be none. Asked before the wait for the tile's stage, which hides the latency
  // of the table.
  __device__ Piece find(const gpu::PageTable& table, Int64 first_entry, const Listing& listing, Int32 n) const {
    const UInt32 size = UInt32(p.pages.size), number = UInt32(listing.leftpad + n * block);  // of row 0
    const Int64 begin = Int64(lane) * size - number % size;  // the row at which the lane's page begins
    Piece out{Int32(clamp(begin, 0, block)), Int32(clamp(begin + size, 0, block)), 0, -1};
    out.place = out.row - Int32(begin);
    const Int32 first = n * block + out.row, last = n * block + out.end - 1;  // keys
    if (out.row < out.end && first < listing.end && last >= listing.begin)
      out.page = gpu::page_of(p.pages, table, first_entry, number + UInt32(out.row));
    return out;
  }

  template <int columns, class TileRing>
  __device__ void load(const TileRing& ring, RingPlace<config.stages>& at, const TensorMap (&boxes)[box_sizes],
                       Piece piece, Int32 kv) const {
    ring.wait_empty(at);
    if (lane == 0) ring.full(at.stage).expect(block * columns * 2);
    __syncwarp();
    while (piece.row < piece.end) {
      const int level = 31 - __clz(piece.end - piece.row), rows = 1 << level;
      load_piece<block, columns / 64>(ring.tile(at.stage) + piece.row * panel_row_bytes, boxes[level],
                                      ring.full(at.stage), {piece.place, kv, piece.page}, rows, keep_in_cache);
      piece.row += rows, piece.place += rows;
    }
    __syncwarp();
    at.advance();
  }

  // One tile of queries after another; `load_tile(w, listing, n)` loads tile n of its keys.
  template <class LoadTile>
  __device__ void load_works(LoadTile load_tile) {
    for (bool more = true; more; slot.advance()) {
      wait_full(shared.work_full(slot.stage), slot);
      const Work<config>& w = shared.work(slot.stage);
      for (Int32 n = w.begin; n < w.end; ++n) load_tile(w, shared.listing(slot.stage), n);
      more = !w.none();
      __syncwarp();  // all lanes have read it
      if (lane == 0) shared.work_empty(slot.stage).arrive();
    }
  }

  __device__ void load_keys() {
    load_works([&](const Work<config>& w, const Listing& listing, Int32 n) {
      const bool loads_Q = lane == 0 && n == w.begin;
      const Piece piece = find(p.pages.k, listing.k_entry, listing, n);
      if (loads_Q && config.q_stages > 1) this->load_Q(w);
      load<config.D>(shared.K(), k, p.k_boxes, piece, w.kv);
      if (loads_Q && config.q_stages == 1) this->load_Q(w);  // its place is free only late
    });
  }

  __device__ void load_values() {
    load_works([&](const Work<config>& w, const Listing& listing, Int32 n) {
      load<config.Dv>(shared.V(), v, p.v_boxes, find(p.pages.v, listing.v_entry, listing, n), w.kv);
    });
  }
};

}  // namespace tessera::sm90
