// SPDX-License-Identifier: Apache-2.0
// Tensor copies from global to shared memory (TMA): whole tiles, swizzled on the way, rows beyond the tensor filled
// with zeros. Thin: one function, one instruction of the PTX ISA. Device code.
#pragma once

#include "sm90/layout.hpp"
#include "sm90/params.hpp"
#include "sm90/ptx/barrier.cuh"

namespace tessera::sm90 {

// How long the L2 cache should keep what is loaded ("createpolicy", as constants).
inline constexpr UInt64 keep_in_cache = 0x14F0000000000000ull, pass_through_cache = 0x12F0000000000000ull;

// Where a tile lies in a tensor map of {columns, tokens, heads, sequences}.
struct TilePlace {
  int token, head, sequence;
};

// "cp.async.bulk.tensor": a tile of `rows` tokens and `panels` times 64 columns. Columns beyond the tensor's become 0.
// The barrier gets the bytes.
template <int rows, int panels>
__device__ inline void load_tile(UInt32 to, const TensorMap& map, const Barrier& barrier, const TilePlace& at,
                                 UInt64 cache) {
#pragma unroll
  for (int n = 0; n < panels; ++n)
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to + n * rows * panel_row_bytes),
        "l"(&map), "r"(barrier.address()), "r"(n * panel_columns), "r"(at.token), "r"(at.head), "r"(at.sequence),
        "l"(cache)
        : "memory");
}

// A piece of such a tile, of as many rows as the map's box has, to whichever row of the tile: hardware swizzles by the
// address in shared memory. A page outside of the map is a piece of zeros.
template <int rows, int panels>
__device__ inline void load_piece(UInt32 to, const TensorMap& map, const Barrier& barrier, const TilePlace& at,
                                  [[maybe_unused]] int piece_rows, UInt64 cache) {
  load_tile<rows, panels>(to, map, barrier, at, cache);
}

// "cp.async.bulk": so many bytes, a multiple of 16, as they are.
template <int bytes>
__device__ inline void load_bytes(UInt32 to, const void* from, const Barrier& barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "n"(bytes), "r"(barrier.address())
               : "memory");
}

// The other way. Columns and tokens beyond the tensor's are left out, but columns only by 16 bytes at a time.
template <int rows, int panels>
__device__ inline void store_tile(const TensorMap& map, UInt32 from, const TilePlace& at) {
#pragma unroll
  for (int n = 0; n < panels; ++n)
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
                 "r"(from + n * rows * panel_row_bytes), "r"(n * panel_columns), "r"(at.token), "r"(at.head),
                 "r"(at.sequence)
                 : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// So many bytes, a multiple of 16, to global memory, or f32 numbers added to those there ("cp.reduce.async.bulk").
template <int bytes>
__device__ inline void store_bytes(void* to, UInt32 from) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2; cp.async.bulk.commit_group;" ::"l"(to),
               "r"(from), "n"(bytes)
               : "memory");
}
template <int bytes>
__device__ inline void add_floats(float* to, UInt32 from) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2; cp.async.bulk.commit_group;" ::"l"(
          to),
      "r"(from), "n"(bytes)
      : "memory");
}

// Until the stores of this thread have read their tiles, or have ended.
__device__ inline void wait_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ inline void wait_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// "fence.proxy.async": what this thread wrote to shared memory is visible to tensor copies and to wgmma; what it has
// seen written to global memory, to its bulk stores.
__device__ inline void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void publish_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Ordinary instructions, for what tensor copies cannot do: 16 bytes, the same set to 0, and an element.
__device__ inline void store_four(UInt32 to, const float* x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}
__device__ inline void clear_chunk(UInt32 at) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
}
__device__ inline UInt16 load_element(UInt32 from) {
  UInt16 x;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(x) : "r"(from) : "memory");
  return x;
}

__device__ inline void prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

}  // namespace tessera::sm90
