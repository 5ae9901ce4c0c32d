// `vector`: the general rung, with every option of the contract: tiles, 16-byte loads, cp.async, blocked products.
// `vector_fma` is the same without tensor cores. See simt/ladder.hpp; the kernels are simt/kernel/vector_*.cuh.
#include <algorithm>
#include <optional>
#include <span>

#include "core/failure.hpp"
#include "core/limits.hpp"
#include "simt/ladder.hpp"

namespace tessera::simt {
namespace {

constexpr Function forward{"vector_forward", "vector_forward", "ForwardParams"};
constexpr Function backward_queries{"vector_backward", "vector_backward_queries", "BackwardParams"};
constexpr Function backward_keys{"vector_backward", "vector_backward_keys", "BackwardParams"};
constexpr Function bias_gradient{"vector_bias_gradient", "vector_bias_gradient", "BackwardParams"};

// Tiles for tensor cores, where 16 rows, or twice that, belong to a warp. `registers`: how many a thread may spend on
// its share of the results and on options, as found by the compile gate: more would spill.
struct TileShape {
  int threads, block_cols, stages, blocks_per_sm, row_tiles = 0, registers = 0;
};

// Best first (docs/experiments.md, "Tiles of vector"); the first that fits is taken. Two blocks on a multiprocessor
// hide each other's waiting.
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

// Tiles for FMA: the planner says how many rows a thread has.
constexpr TileShape fma_tiles[] = {{256, 64, 1, 1}, {256, 32, 1, 1}, {128, 32, 1, 1}, {128, 16, 1, 1}, {64, 16, 1, 1}};

// The problem and the GPU: everything that tile choices depend on.
struct Planner {
  const Problem& p;
  const cuda::Target& target;
  bool tensor_cores;

  bool fits_shared(const Config& c, int (*shared_bytes)(const Config&)) const {
    constexpr int reserved = 1024;  // by the system, of every block
    return (shared_bytes(c) + reserved) * c.blocks_per_sm <= target.shared_bytes + reserved;
  }

  Config config_for(const TileShape& shape) const {
    Config c = config_of(p, shape.threads);
    c.block_cols = shape.block_cols, c.stages = shape.stages, c.blocks_per_sm = shape.blocks_per_sm;
    c.dbias = Element::none;
    return c;
  }

  // `width`: columns of the results that a block keeps. `fma_rows`: rows of a thread, at most, where products are by
  // FMA, which takes what tensor cores have no tile for.
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
    // Options need registers of their own: with eight rows to a thread they would spill.
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
    // The gate finds that one wide gradient alone needs more registers than two of half its width.
    const std::int64_t room = dk && dv ? 0 : 32;
    std::optional<Config> c = config(key_tiles, width + room, fma_rows, vector_backward_shared_bytes);
    // Together they need more registers than there are: one after the other then, if tensor cores take that.
    if (c && !c->tensor_cores && tensor_cores && dk && dv)
      return add_dk_dv(steps, true, false) && add_dk_dv(steps, false, true);
    if (!c) return false;
    if (!dk) c->dk = Element::none;
    if (!dv) c->dv = Element::none;
    steps.add(step(backward_keys, *c, key_blocks(p, c->block_rows), vector_backward_shared_bytes(*c)));
    return true;
  }

  bool add_dbias(Steps& steps) const {
    // The tile of sums counts as the result.
    std::optional<Config> c = config(std::span(key_tiles).subspan(2), 64, 4, vector_backward_shared_bytes);
    if (!c) return false;
    c->dq = Element::none, c->dbias = element_of(*p.dbias);
    const auto& [batches, heads, rows, keys] = p.bias->shape;
    const std::int64_t tiles = product({ceil_div(rows, c->block_rows), ceil_div(keys, c->block_cols)});
    Step made = step(bias_gradient, *c, product({batches, heads, tiles}), vector_backward_shared_bytes(*c));
    // Another family's correction of the scale is for its own products.
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
  constexpr std::int64_t most_counted = std::int64_t{1} << 34;  // tiles of 16 and more, in 32 bits
  if (std::max(p.Nq, p.Nk) > most_counted)
    return Steps::refused(
        text("Nq is ", p.Nq, " and Nk is ", p.Nk, "; this rung counts up to ", most_counted, " tokens"));
  const Planner planner{p, target, tensor_cores};
  return p.pass == Pass::forward ? planner.forward_steps() : planner.backward_steps();
}

// Beyond 256 dims a row's results no longer fit the registers of the few lanes that share it.
bool has_tensor_cores(const Problem& p, const cuda::Target& target) {
  return target.major >= 8 && p.D <= 256 && p.Dv <= 256;
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

}  // namespace tessera::simt
