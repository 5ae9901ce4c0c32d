// `vector`: the general rung, with every option of the contract; tiles, 16-byte loads, cp.async, blocked products.
// See simt/ladder.hpp; the kernels are simt/kernel/vector_*.cuh.
#include <optional>

#include "core/failure.hpp"
#include "simt/ladder.hpp"

namespace tessera::simt {
namespace {

constexpr Function sink_gradient{"simt/kernel/sink_gradient.cuh", "sink_gradient", "BackwardParams"};
constexpr Function forward{"simt/kernel/vector_forward.cuh", "vector_forward", "ForwardParams"};
constexpr Function backward_queries{"simt/kernel/vector_backward.cuh", "vector_backward_queries", "BackwardParams"};
constexpr Function backward_keys{"simt/kernel/vector_backward.cuh", "vector_backward_keys", "BackwardParams"};

// The largest tile that fits the GPU's shared memory. `rows` of a block's rows belong to one thread, which keeps its
// share of their results in registers.
std::optional<Config> fitting_config(const Problem& p, const cuda::Target& target, int rows,
                                     int (*shared_bytes)(const Config&)) {
  for (const auto& [threads, block_cols] : {std::pair{256, 64}, {256, 32}, {128, 32}, {128, 16}, {64, 16}}) {
    Config c = config_of(p, threads);
    c.block_rows = threads / lanes_per_row * rows, c.block_cols = block_cols, c.rows_per_thread = rows;
    if (shared_bytes(c) <= target.shared_bytes) return c;
  }
  return {};
}

Steps refusal(std::string reason) { return {.list = {}, .accumulators = {}, .reason = std::move(reason)}; }

Steps no_tile(const Problem& p, const cuda::Target& target) {
  return refusal(text("D is ", p.D, " and Dv is ", p.Dv, "; no tile fits the ", target.shared_bytes,
                      " bytes of shared memory of ", target.architecture()));
}

}  // namespace

Steps vector_steps(const Problem& p, const cuda::Target& target) {
  if (p.dbias) return refusal("dBias is asked for; this kernel does not compute it yet");
  Steps steps;
  if (p.pass == Pass::forward) {
    // Options need registers of their own: with eight rows to a thread they would spill.
    const Config options = config_of(p, 0);
    const bool plain = !options.softcap && !options.alibi && !options.mask && !options.dropout && !p.bias;
    const int rows = p.Dv <= 128 && plain ? 8 : p.Dv <= 256 ? 4 : 2;
    const std::optional<Config> c = fitting_config(p, target, rows, vector_forward_shared_bytes);
    if (!c) return no_tile(p, target);
    steps.add(forward, *c, query_blocks(p, c->block_rows), vector_forward_shared_bytes(*c));
    return steps;
  }
  add_backward_start(steps, p);
  if (p.dq) {
    const int rows = p.D <= 64 ? 8 : p.D <= 128 ? 4 : 2;
    const std::optional<Config> c = fitting_config(p, target, rows, vector_backward_shared_bytes);
    if (!c) return no_tile(p, target);
    steps.add(backward_queries, *c, query_blocks(p, c->block_rows), vector_backward_shared_bytes(*c));
  }
  if (p.dk || p.dv) {
    const std::int64_t width = p.D + p.Dv;
    const int rows = width <= 64 ? 8 : width <= 256 ? 4 : width <= 512 ? 2 : 1;
    const std::optional<Config> c = fitting_config(p, target, rows, vector_backward_shared_bytes);
    if (!c) return no_tile(p, target);
    steps.add(backward_keys, *c, key_blocks(p, c->block_rows), vector_backward_shared_bytes(*c));
  }
  if (p.dsinks) steps.add(sink_gradient, config_of(p, 256), p.Hq);
  return steps;
}

}  // namespace tessera::simt
