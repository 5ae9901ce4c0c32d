// What the compiler must know to specialise a Hopper backward kernel, and how its shared memory is laid out. Shared by
// host and device text. Names as in simt/config.hpp, "The backward kernels": rows X and Y stay, columns x and y stream.
#pragma once

#include "sm90/config.hpp"

namespace tessera::sm90 {

using simt::Side;

struct BackwardConfig {
  Side side = Side::queries;        // X = Q, Y = dO, x = K, y = V; or X = K, Y = V, x = Q, y = dO
  int D = 128, Dv = 128;            // multiples of 64: what the tensors lack is 0 in shared memory
  Element element = Element::bf16;  // of Q, K, V and dO
  Element dX = Element::bf16;       // dQ, or dK; none where it is not wanted
  Element dY = Element::none;       // dV
  int warpgroups = 2;               // that compute, of 64 rows each; one more loads
  int block_columns = 64;           // of a tile
  int stages = 2;                   // tiles of x and y in shared memory
  // A tile's sums end before the next tile's scores begin. That leaves registers for more columns.
  bool drains = false;

  constexpr bool operator==(const BackwardConfig&) const = default;
};

constexpr bool owns_queries(const BackwardConfig& c) { return c.side == Side::queries; }

constexpr int rows_of(const BackwardConfig& c) { return 64 * c.warpgroups; }
constexpr int threads_of(const BackwardConfig& c) { return 128 * (c.warpgroups + 1); }

// Tiles of columns that a warpgroup may pass over at either end, because only others see them, while its last sums keep
// a place in the ring: what it waits for must find room. Of keys, the end of one head's is followed by the next one's
// beginning.
constexpr int most_passed(const BackwardConfig& c) { return (c.stages - 1) / (owns_queries(c) ? 1 : 2); }

// Registers of a thread, by role (setmaxnreg).
constexpr int producer_registers(const BackwardConfig& c) { return c.warpgroups == 2 ? 24 : 32; }
constexpr int consumer_registers(const BackwardConfig& c) { return c.warpgroups == 2 ? 240 : 160; }

// Byte offsets. Tiles begin at multiples of 1024, as the 128-byte swizzle demands.
struct BackwardLayout {
  int X, Y, x, y, lse2, delta, blind, work, barriers, bytes;  // X, Y: tiles of 64 rows, one per warpgroup
  int X_bytes, Y_bytes, x_bytes, y_bytes;
};

constexpr BackwardLayout layout_of(const BackwardConfig& c) {
  BackwardLayout l{};
  l.X_bytes = 64 * c.D * 2, l.Y_bytes = 64 * c.Dv * 2;
  l.x_bytes = c.block_columns * c.D * 2, l.y_bytes = c.block_columns * c.Dv * 2;
  l.X = 0;
  l.Y = l.X + c.warpgroups * l.X_bytes;
  l.x = l.Y + c.warpgroups * l.Y_bytes;
  l.y = l.x + c.stages * l.x_bytes;
  // Of streamed queries, a row of numbers per stage, and whether one of them is to be left out.
  l.lse2 = l.y + c.stages * l.y_bytes;
  l.delta = l.lse2 + c.stages * c.block_columns * 4;
  l.blind = l.delta + c.stages * c.block_columns * 4;
  l.work = l.blind + c.stages * 8;
  l.barriers = l.work + work_bytes;
  l.bytes = l.barriers + 8 * (c.warpgroups + 2 * c.stages);
  return l;
}

}  // namespace tessera::sm90
