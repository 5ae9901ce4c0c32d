// SPDX-License-Identifier: Apache-2.0
// What the compiler must know to specialise a Hopper kernel, and how its shared memory is laid out. Shared by host and
// device code. docs/gpu_kernels.md, "Hopper", says why it is laid out so.
#pragma once

#include "gpu/config.hpp"

namespace tessera::sm90 {

using gpu::Element;

inline constexpr int most_tile_dims = 256;  // D and Dv of the largest tile

struct Config {
  int D = 128, Dv = 128;                               // multiples of 64: what the tensors lack is 0 in shared memory
  Element element = Element::bf16, o = Element::bf16;  // of Q, K and V; of O: the same, or f32
  int warpgroups = 2;                                  // that compute, of 64 queries each; one more loads
  int block_keys = 128;                                // keys of a tile
  int stages = 2;                                      // tiles of K, and of V, in shared memory
  int q_stages = 1;  // tiles of Q: with two, the next one comes while this one is in use
  // Registers of P: with two, softmax writes one while the tensor cores read the other, and needs no maximum of its
  // tile. With one, it works in the scores' place, and leaves more registers to O.
  int p_buffers = 2;
  bool paged = false;    // keys are found by a page table
  bool stages_O = true;  // O leaves by way of shared memory and a tensor copy; otherwise from registers
  // Rows may begin and end with a state, and every tile of keys leaves in m and l all that decides about their bits.
  bool carried = false;
  // S is the sum of two products, of half the dims each: what tensor cores cut off a sum grows with its length.
  bool halves_S = false;
  // Scores are computed one by one, with whichever options are on, not as scale times S.
  bool general = false;
  gpu::ScoreConfig options{};

  constexpr bool operator==(const Config&) const = default;
};

constexpr int rows_of(const Config& c) { return 64 * c.warpgroups; }
constexpr int threads_of(const Config& c) { return 128 * (c.warpgroups + 1); }

// Tiles of keys that a warpgroup may pass over, because only others see them, while its last P waits for its V: what
// comes after that V must find room in the ring. Of three warpgroups the middle one may pass over some at either end.
constexpr int most_passed(const Config& c) { return (c.stages - 1) / (c.warpgroups - 1); }

// Registers of a thread, by role (setmaxnreg): what the launch allocates evenly is dealt out anew. Roles that ask for
// more than that in all would wait for it for ever.
constexpr int producer_registers(const Config& c) { return c.warpgroups == 2 ? 40 : 32; }
constexpr int consumer_registers(const Config& c) { return c.warpgroups == 2 ? 232 : 160; }
constexpr bool registers_suffice(int warpgroups, int producer, int consumer) {
  const int launched = 65536 / (128 * (warpgroups + 1)) / 8 * 8;  // of a thread; the compiler allocates eights
  return producer + warpgroups * consumer <= (warpgroups + 1) * launched;
}

// Tiles of queries that are described in shared memory: in work, and to come; and where their keys are listed, if they
// lie in pages.
inline constexpr int work_slots = 4, work_bytes = 128, listing_bytes = 32;

// Keys in pages: the rows of a tile that lie in one page are a piece, which comes in boxes of 1, 2, 4, ... rows, a
// tensor map each. A lane copies a piece, and small boxes make many copies, so pages are not too small.
inline constexpr int box_sizes = 8, least_page_size = 16;
constexpr int most_pieces(const Config& c) { return (c.block_keys - 2) / least_page_size + 2; }
constexpr bool boxes_suffice(const Config& c) { return c.block_keys < 2 << (box_sizes - 1) && most_pieces(c) <= 32; }

// Who reads a description besides the consumers: with pages, a warp copies K and another one V.
constexpr int loaders_of(const Config& c) { return c.paged ? 2 : 1; }

// Byte offsets. Tiles begin at multiples of 1024, as the 128-byte swizzle demands.
struct Layout {
  int Q, K, V, O, work, listings, barriers, bytes;  // Q, O: tiles of 64 rows, one per (stage and) warpgroup
  int q_bytes, k_bytes, v_bytes, o_bytes;
};

constexpr Layout layout_of(const Config& c) {
  Layout l{};
  l.q_bytes = 64 * c.D * 2, l.o_bytes = c.stages_O ? 64 * c.Dv * 2 : 0;
  l.k_bytes = c.block_keys * c.D * 2, l.v_bytes = c.block_keys * c.Dv * 2;
  l.Q = 0;
  l.K = l.Q + c.q_stages * c.warpgroups * l.q_bytes;
  l.V = l.K + c.stages * l.k_bytes;
  l.O = l.V + c.stages * l.v_bytes;
  l.work = l.O + c.warpgroups * l.o_bytes;
  l.listings = l.work + work_slots * work_bytes;
  l.barriers = l.listings + (c.paged ? work_slots * listing_bytes : 0);
  const int slots = c.q_stages * c.warpgroups + 2 * c.stages + work_slots;  // each with a full and an empty barrier
  l.bytes = l.barriers + 8 * (2 * slots + work_slots * (c.warpgroups - 1));
  return l;
}

}  // namespace tessera::sm90
