// Tensor copies between global and shared memory (TMA): whole tiles, swizzled on the way, rows beyond the tensor filled
// with zeros or left out. Thin: one function, one instruction of the PTX ISA. Device text.
#pragma once

#include "sm90/params.hpp"
#include "sm90/ptx/barrier.cuh"

namespace tessera::sm90 {

// How long the L2 cache should keep what is loaded ("createpolicy", as constants).
inline constexpr UInt64 keep_in_cache = 0x14F0000000000000ull, pass_through_cache = 0x12F0000000000000ull;

// Where a tile lies in a tensor map of {64, tokens, panels, heads, sequences}.
struct TilePlace {
  int token, head, sequence;
};

// "cp.async.bulk.tensor": all panels of a tile; the barrier gets the bytes.
__device__ inline void load_tile(UInt32 to, const TensorMap& map, const Barrier& barrier, const TilePlace& at,
                                 UInt64 cache) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to),
      "l"(&map), "r"(barrier.address()), "r"(0), "r"(at.token), "r"(0), "r"(at.head), "r"(at.sequence), "l"(cache)
      : "memory");
}

__device__ inline void store_tile(const TensorMap& map, UInt32 from, const TilePlace& at) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(&map),
      "r"(from), "r"(0), "r"(at.token), "r"(0), "r"(at.head), "r"(at.sequence)
      : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until the stores of this thread have read their tiles, or have ended.
__device__ inline void wait_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ inline void wait_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// "fence.proxy.async": what this thread wrote to shared memory is visible to tensor copies and to wgmma.
__device__ inline void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// 16 bytes of shared memory: to 0, and to global memory. Ordinary instructions, for what tensor copies cannot do.
__device__ inline void clear_chunk(UInt32 at) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
}
__device__ inline void copy_chunk(void* to, UInt32 from) {
  UInt32 a, b, c, d;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(from) : "memory");
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ inline void prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

}  // namespace tessera::sm90
