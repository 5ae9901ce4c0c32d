// SPDX-License-Identifier: Apache-2.0
// `tiled`: tiles in shared memory, __syncthreads() between steps. Its backward pass accumulates dK and dV with float
// atomics. See ladder/ladder.hpp; the kernels are ladder/kernel/tiled_*.cuh.
#include "core/limits.hpp"
#include "ladder/ladder.hpp"

namespace tessera::ladder {
namespace {

constexpr Function forward{"tiled_forward", "tiled_forward", "ForwardParams"};
constexpr Function backward{"tiled_backward", "tiled_backward", "BackwardParams"};

struct Tile {
  int rows, cols, threads;
};
constexpr Tile tiles[] = {{32, 32, 256}, {16, 16, 128}, {8, 8, 64}, {8, 4, 32}};

constexpr Config with_tile(Config c, const Tile& tile) {
  c.block_rows = tile.rows, c.block_cols = tile.cols, c.threads = tile.threads;
  c.wide_loads = false;  // this rung loads element by element
  return c;
}

// The 32 x 32 tiles of ancestor B's problem (cases/ancestor_b.hpp) fit the 48 KB of shared memory that need no opt-in.
// The widest heads have a tile that fits every GPU: a block may use 64 KB on sm_75, more on later ones.
constexpr Config ancestor_b = with_tile({.D = 32, .Dv = 32}, tiles[0]);
static_assert(tiled_forward_shared_bytes(ancestor_b) <= 48 << 10);
static_assert(tiled_backward_shared_bytes(ancestor_b) <= 48 << 10);
constexpr Config widest = with_tile({.D = most_dims, .Dv = most_value_dims}, tiles[std::size(tiles) - 1]);
static_assert(tiled_forward_shared_bytes(widest) <= 64 << 10);
static_assert(tiled_backward_shared_bytes(widest) <= 64 << 10);

// The largest tile that fits the GPU's shared memory.
Config fitting_config(const Problem& p, const cuda::Target& target, int (*shared_bytes)(const Config&)) {
  Config c;
  for (const Tile& tile : tiles) {
    c = with_tile(config_of(p, tile.threads), tile);
    if (shared_bytes(c) <= target.shared_bytes) break;
  }
  return c;
}

}  // namespace

Steps tiled_steps(const Problem& p, const cuda::Target& target) {
  Steps steps(p);
  steps.reason = early_refusal(p);
  if (steps.reason.empty() && p.pass == Pass::backward && p.options.deterministic)
    steps.reason =
        "deterministic is true; this rung's backward pass adds with float atomics, whose order changes from run to run";
  if (!steps.reason.empty()) return steps;

  if (p.pass == Pass::forward) {
    const Config c = fitting_config(p, target, tiled_forward_shared_bytes);
    steps.add(step(forward, c, query_blocks(p, c.block_rows), tiled_forward_shared_bytes(c)));
    return steps;
  }
  steps.accumulators = {.dk = p.dk ? 1 : 0, .dv = p.dv ? 1 : 0};
  add_backward_start(steps, p);
  Config c = fitting_config(p, target, tiled_backward_shared_bytes);
  if (p.D + p.Dv <= 256) c.blocks_per_sm = 2;  // the occupancy that registers allow
  steps.add(step(backward, c, query_blocks(p, c.block_rows), tiled_backward_shared_bytes(c)));
  add_conversion(steps, p);
  return steps;
}

}  // namespace tessera::ladder
