// What the compiler must know to specialise a Hopper kernel, and how its shared memory is laid out. Shared by host and
// device text. docs/architecture.md, "Hopper", says why it is laid out so.
#pragma once

#include "simt/config.hpp"

namespace tessera::sm90 {

using simt::Element;

struct Config {
  int D = 128, Dv = 128;  // multiples of 64: what the tensors lack is 0 in shared memory
  Element element = Element::bf16;
  int warpgroups = 2;    // that compute, of 64 queries each; one more loads
  int block_keys = 128;  // keys of a tile
  int stages = 2;        // tiles of K, and of V, in shared memory
  bool O_in_Q = false;   // O leaves through Q's memory; otherwise it has its own, and the next Q comes earlier

  constexpr bool operator==(const Config&) const = default;
};

constexpr int rows_of(const Config& c) { return 64 * c.warpgroups; }
constexpr int threads_of(const Config& c) { return 128 * (c.warpgroups + 1); }

// Registers of a thread, by role (setmaxnreg): what the launch allocates evenly is dealt out anew.
constexpr int producer_registers(const Config& c) { return c.warpgroups == 2 ? 40 : 32; }
constexpr int consumer_registers(const Config& c) { return c.warpgroups == 2 ? 232 : 160; }

// Byte offsets. Tiles begin at multiples of 1024, as the 128-byte swizzle demands.
struct Layout {
  int Q, K, V, O, barriers, bytes;  // Q, O: one tile of 64 rows per warpgroup
  int q_bytes, k_bytes, v_bytes, o_bytes;
};

constexpr Layout layout_of(const Config& c) {
  Layout l{};
  l.q_bytes = 64 * c.D * 2, l.o_bytes = 64 * c.Dv * 2;
  l.k_bytes = c.block_keys * c.D * 2, l.v_bytes = c.block_keys * c.Dv * 2;
  l.Q = 0;
  l.K = l.Q + c.warpgroups * l.q_bytes;
  l.V = l.K + c.stages * l.k_bytes;
  const int end = l.V + c.stages * l.v_bytes;
  l.O = c.O_in_Q ? l.Q : end;
  l.barriers = c.O_in_Q ? end : end + c.warpgroups * l.o_bytes;
  l.bytes = l.barriers + 8 * (2 * c.warpgroups + 4 * c.stages);
  return l;
}

}  // namespace tessera::sm90
