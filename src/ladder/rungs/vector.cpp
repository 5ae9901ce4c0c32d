// SPDX-License-Identifier: Apache-2.0
// `vector`: the general rung, with every option of the contract: tiles in shared memory, 16-byte vector loads, cp.async
// prefetch, register blocking, TF32 tensor cores. `vector_fma` is the same without tensor cores. See ladder/ladder.hpp;
// the kernels are ladder/kernel/vector_*.cuh.
#include <algorithm>
#include <optional>
#include <span>

#include "core/failure.hpp"
#include "core/limits.hpp"
#include "ladder/ladder.hpp"

namespace tessera::ladder {
namespace {

constexpr Function forward{"vector_forward", "vector_forward", "ForwardParams"};
constexpr Function backward_queries{"vector_backward", "vector_backward_queries", "BackwardParams"};
constexpr Function backward_keys{"vector_backward", "vector_backward_keys", "BackwardParams"};
constexpr Function bias_gradient{"vector_bias_gradient", "vector_bias_gradient", "BackwardParams"};

// Tile shapes for tensor cores: a warp owns 16 rows times `row_tiles`. `registers`: a thread's budget for accumulators
// and options, found with the compile gate: beyond it the kernel spills.
struct TileShape {
  int threads, block_cols, stages, blocks_per_sm, row_tiles = 0, registers = 0;
};

// Best first (docs/experiments.md, "Tiles of vector"); the first that fits is taken. Two resident blocks per
// multiprocessor hide each other's latency.
constexpr TileShape forward_tiles[] = {{128, 64, 1, 2, 2, 64},  {128, 64, 2, 2, 1, 80},  {128, 32, 2, 2, 1, 144},
                                       {128, 32, 1, 2, 1, 144}, {256, 32, 1, 1, 1, 144}, {128, 32, 1, 1, 1, 144},
                                       {64, 32, 1, 1, 1, 144}};
constexpr TileShape query_tiles[] = {{128, 32, 1, 2, 2, 64},  {128, 64, 1, 2, 1, 112}, {128, 32, 2, 2, 1, 112},
                                     {128, 32, 1, 2, 1, 112}, {128, 32, 1, 1, 1, 112}, {64, 32, 1, 1, 1, 112}};
constexpr TileShape key_tiles[] = {{128, 64, 1, 2, 1, 64},
                                   {128, 32, 2, 2, 1, 128},
                                   {128, 32, 1, 2, 1, 128},
                                   {128, 32, 1, 1, 1, 128},
                                   {64, 32, 1, 1, 1, 128}};

// Tile shapes for FMA: the planner chooses the rows of a thread (register blocking).
constexpr TileShape fma_tiles[] = {{256, 64, 1, 1}, {256, 32, 1, 1}, {128, 32, 1, 1}, {128, 16, 1, 1}, {64, 16, 1, 1}};

// Chooses tiles and launches; the problem and the GPU are all that its choices depend on.
struct Planner {
  const Problem& p;
  const cuda::Target& target;
  bool tensor_cores;

  bool fits_shared(const Config& c, int (*shared_bytes)(const Config&)) const {
    constexpr int reserved = 1024;  // shared memory that the system takes from every block
    return (shared_bytes(c) + reserved) * c.blocks_per_sm <= target.shared_bytes + reserved;
  }

  Config config_for(const TileShape& shape) const {
    Config c = config_of(p, shape.threads);
    c.block_cols = shape.block_cols, c.stages = shape.stages, c.blocks_per_sm = shape.blocks_per_sm;
    c.dbias = Element::none;
    return c;
  }

  // `width`: columns of the accumulators that a block keeps in registers. `fma_rows`: at most this many rows per thread
  // with FMA, the fallback where no tensor-core tile fits.
  std::optional<Config> config(std::span<const TileShape> shapes, std::int64_t width, int fma_rows,
                               int (*shared_bytes)(const Config&)) const {
    if (!tensor_cores) shapes = {};
    for (const TileShape& shape : shapes) {
      Config c = config_for(shape);
      c.tensor_cores = true;
      c.rows_per_thread = 2 * shape.row_tiles;
      c.block_rows = shape.threads / 2 * shape.row_tiles;
      const int options = c.options.count();
      const std::int64_t results = c.rows_per_thread * width / tensor_lanes;
      if (results + 16 * options <= shape.registers && fits_shared(c, shared_bytes)) return c;
    }
    for (int rows = fma_rows; rows >= 1; rows /= 2)
      for (const TileShape& shape : fma_tiles) {
        Config c = config_for(shape);
        c.rows_per_thread = rows;
        c.block_rows = shape.threads / fma_lanes * rows;
        if (fits_shared(c, shared_bytes)) return c;
      }
    return {};
  }

  Steps no_tile() const {
    return Steps::refused(text("D is ", p.D, " and Dv is ", p.Dv, "; no tile fits the ", target.shared_bytes,
                               " bytes of shared memory of ", target.architecture()));
  }

  Steps forward_steps() const {
    // Register pressure: options need registers of their own, and eight rows per thread would spill.
    const int fma_rows = p.Dv <= 128 && !score_config(p).any() ? 8 : p.Dv <= 256 ? 4 : 2;
    const std::optional<Config> c = config(forward_tiles, p.Dv, fma_rows, vector_forward_shared_bytes);
    if (!c) return no_tile();
    Steps steps(p);
    steps.add(step(forward, *c, query_blocks(p, c->block_rows), vector_forward_shared_bytes(*c)));
    return steps;
  }

  // These return false if no tile fits.

  bool add_dq(Steps& steps) const {
    const int fma_rows = p.D <= 64 ? 8 : p.D <= 128 ? 4 : 2;
    std::optional<Config> c = config(query_tiles, p.D, fma_rows, vector_backward_shared_bytes);
    if (!c) return false;
    c->own_delta = true;
    steps.add(step(backward_queries, *c, query_blocks(p, c->block_rows), vector_backward_shared_bytes(*c)));
    return true;
  }

  bool add_dk_dv(Steps& steps, bool dk, bool dv) const {
    const std::int64_t width = (dk ? p.D : 0) + (dv ? p.Dv : 0);
    const int fma_rows = width <= 64 ? 8 : width <= 256 ? 4 : width <= 512 ? 2 : 1;
    // The compile gate shows that one wide gradient alone needs more registers than two of half its width.
    const std::int64_t room = dk && dv ? 0 : 32;
    std::optional<Config> c = config(key_tiles, width + room, fma_rows, vector_backward_shared_bytes);
    // The accumulators of dK and dV together need more registers than a thread has: two launches then, if each has a
    // tensor-core tile.
    if (c && !c->tensor_cores && tensor_cores && dk && dv)
      return add_dk_dv(steps, true, false) && add_dk_dv(steps, false, true);
    if (!c) return false;
    if (!dk) c->dk = Element::none;
    if (!dv) c->dv = Element::none;
    steps.add(step(backward_keys, *c, key_blocks(p, c->block_rows), vector_backward_shared_bytes(*c)));
    return true;
  }

  bool add_dbias(Steps& steps) const {
    // The accumulator is one tile of dBias: 64 columns, whatever the head dim.
    std::optional<Config> c = config(std::span(key_tiles).subspan(2), 64, 4, vector_backward_shared_bytes);
    if (!c) return false;
    c->dq = Element::none, c->dbias = element_of(*p.dbias);
    const auto& [batches, heads, rows, keys] = p.bias->shape;
    const std::int64_t tiles = product({ceil_div(rows, c->block_rows), ceil_div(keys, c->block_cols)});
    Step made = step(bias_gradient, *c, product({batches, heads, tiles}), vector_backward_shared_bytes(*c));
    // score_scale may hold another family's correction for the truncation of its own tensor cores; this kernel needs
    // the plain scale.
    made.gives<BackwardParams>([](const Given& given) {
      BackwardParams params = given.backward();
      params.x.score_scale = params.x.scale;
      return params;
    });
    steps.add(std::move(made));
    return true;
  }

  Steps backward_steps() const {
    Steps steps(p);
    add_backward_start(steps, p, !p.dq);
    if (p.dq && !add_dq(steps)) return no_tile();
    if ((p.dk || p.dv) && !add_dk_dv(steps, p.dk.has_value(), p.dv.has_value())) return no_tile();
    if (p.dbias && !add_dbias(steps)) return no_tile();
    add_sink_gradient(steps, p);
    return steps;
  }
};

Steps plan(const Problem& p, const cuda::Target& target, bool tensor_cores) {
  constexpr std::int64_t most_counted = std::int64_t{1} << 34;  // 32-bit tile indices, tiles of 16 and more
  if (std::max(p.Nq, p.Nk) > most_counted)
    return Steps::refused(
        text("Nq is ", p.Nq, " and Nk is ", p.Nk, "; this rung counts up to ", most_counted, " tokens"));
  const Planner planner{p, target, tensor_cores};
  return p.pass == Pass::forward ? planner.forward_steps() : planner.backward_steps();
}

// Beyond these dims the accumulators of a row do not fit the registers of the four lanes that share it.
constexpr std::int64_t most_tensor_dims = 256;
bool has_tensor_cores(const Problem& p, const cuda::Target& target) {
  return target.major >= 8 && p.D <= most_tensor_dims && p.Dv <= most_tensor_dims;
}

}  // namespace

Steps vector_steps(const Problem& p, const cuda::Target& target) {
  return plan(p, target, has_tensor_cores(p, target));
}

void add_bias_gradient(Steps& steps, const Problem& p, const cuda::Target& target) {
  const Planner planner{p, target, has_tensor_cores(p, target)};
  if (p.dbias && !planner.add_dbias(steps)) steps.reason = planner.no_tile().reason;
}

Steps vector_fma_steps(const Problem& p, const cuda::Target& target) { return plan(p, target, false); }

}  // namespace tessera::ladder
