// SPDX-License-Identifier: Apache-2.0
// The plan of `mma_one_pass`: what it refuses, its three launches and what they keep in the workspace; see plan.hpp.
#include <algorithm>
#include <bit>
#include <limits>
#include <numbers>

#include "core/failure.hpp"
#include "core/limits.hpp"
#include "core/tensor.hpp"
#include "gpu/unit.hpp"
#include "mma/algorithms.hpp"
#include "mma/layout.hpp"
#include "mma/params.hpp"
#include "mma/plan.hpp"

namespace tessera::mma {
namespace {

using gpu::Given;
using gpu::spelled;
using gpu::Step;
using gpu::Steps;

std::string config_text(const OnePassConfig& c) {
  return text("tessera::mma::OnePassConfig config{.D = ", c.D, ", .Dv = ", c.Dv, ", .element = ", spelled(c.element),
              ", .dK = ", spelled(c.dK), ", .dV = ", spelled(c.dV), ", .warps = ", c.warps,
              ", .row_tiles = ", c.row_tiles, ", .paired = ", spelled(c.paired), ", .block_queries = ", c.block_queries,
              ", .q_stages = ", c.q_stages, ", .o_stages = ", c.o_stages, ", .blocks_per_sm = ", c.blocks_per_sm,
              ", .copy_bytes = ", c.copy_bytes, ", .whole = ", spelled(c.whole), ", .halves_S = ", spelled(c.halves_S),
              ", .turing = ", spelled(c.turing), ", .ordered = ", spelled(c.ordered), ", .turn_tiles = ", c.turn_tiles,
              "}");
}

std::string prepare_unit_text(const PrepareConfig& c) {
  return gpu::UnitText{.file = "mma/kernel/prepare.cuh",
                       .function = "tessera::mma::prepare<config>",
                       .parameters = "tessera::mma::PrepareParams",
                       .config = text("tessera::mma::PrepareConfig config{.o = ", spelled(c.o), ", .d_o = ",
                                      spelled(c.d_o), ", .lanes = ", c.lanes, ", .aligned = ", spelled(c.aligned), "}"),
                       .launch_bounds = text(prepare_threads)}
      .str();
}

std::string finish_unit_text(const FinishConfig& c) {
  return gpu::UnitText{
      .file = "mma/kernel/finish.cuh",
      .function = "tessera::mma::finish<config>",
      .parameters = "tessera::mma::FinishParams",
      .config = text("tessera::mma::FinishConfig config{.D = ", c.D, ", .queries = ", c.queries, ", .warps = ", c.warps,
                     ", .ordered = ", spelled(c.ordered), ", .dQ = ", spelled(c.dQ), "}"),
      .launch_bounds = text(32 * c.warps)}
      .str();
}

std::string one_pass_refusal(const Problem& p) {
  if (!p.dq || !p.dk || !p.dv) return "not all of dQ, dK and dV are asked for; one pass makes all of them";
  if (p.d_o != p.q_type)
    return text("dO is ", name_of(*p.d_o), " and Q is ", name_of(p.q_type), "; one pass takes both in one type");
  if (!(p.options.scale > 0)) return text("scale is ", p.options.scale, "; one pass takes scales above 0");
  if (const std::string option = score_option_text(p); !option.empty()) return option + "; one pass takes none";
  if (p.mask) return "a mask tensor is given; one pass takes causal and window only";
  if (!p.has_queries() || !p.has_keys())
    return text("B is ", p.B, ", Nq is ", p.Nq, ", Nk is ", p.Nk, ", Hq is ", p.Hq, " and Hk is ", p.Hk,
                "; one pass needs at least one of each");
  return "";
}

struct Plan {
  OnePassConfig config;
  std::int64_t blocks = 0, blocks_per_head = 0;  // of keys
  std::int64_t tiles = 0, tiles_per_head = 0;    // of queries
  int section = 1;
  // In the family's own part of the workspace. What the first launch sets to 0 comes first: the counts, and the sums
  // where they are only added to.
  std::int64_t sums_at = 0, own_bytes = 0, zero_bytes = 0;

  OnePassMemory memory(std::byte* own) const {
    auto* counts = reinterpret_cast<UInt32*>(own);
    return {.sums = reinterpret_cast<float*>(own + sums_at),
            .counts = counts + 1,
            .taken = counts,
            .tiles_per_head = static_cast<Int32>(tiles_per_head)};
  }
};

// Few heads at once, as in Hopper's one pass: what their works share should stay in the L2 cache, which is Q, dO and
// the sums of dQ of the query head that they are at. But works that add in order wait for each other, so there are at
// least as many heads as it takes for a head's works to come to a tile, or to all that are passed on at once, one after
// another; under a causal mask, where works differ, it takes more.
std::int64_t heads_at_once(const Problem& p, const OnePassConfig& c, const cuda::Target& target) {
  constexpr std::int64_t few_when_causal = 16;
  const std::int64_t cached = gpu::heads_in_cache(target, p.Nq * (2 * (p.D + p.Dv) + 4 * c.D));
  const std::int64_t resident = std::int64_t{target.multiprocessors} * c.blocks_per_sm;
  const std::int64_t in_turn = ceil_div(resident * c.turn_tiles, ceil_div(p.Nq, std::int64_t{c.block_queries}));
  return std::max({cached, in_turn, p.options.causal ? few_when_causal : std::int64_t{1}});
}

// Two tiles at once halve the fences, but blocks of a head then follow each other two tiles apart: under a mask, which
// gives them different numbers of tiles, that costs more than it saves unless sequences are long (docs/experiments.md,
// "Turns passed on by blocks"). No bit shows it.
int best_turn_tiles(const Options& o) { return o.causal || o.window_left >= 0 || o.window_right >= 0 ? 1 : 2; }

Plan plan_of(const Problem& p, const OnePassConfig& c, const cuda::Target& target) {
  Plan plan{.config = c};
  const std::int64_t heads = p.packed ? p.Hk : p.B * p.Hk;
  plan.blocks = gpu::key_blocks(p, keys_of(c));
  plan.blocks_per_head = plan.blocks / heads;
  plan.section = section_of(heads, heads_at_once(p, c, target));
  plan.tiles_per_head = gpu::block_count(p.packed, p.Nq, c.block_queries, p.B);
  plan.tiles = product({p.Hq, plan.tiles_per_head});
  const std::int64_t counts = 1 + (c.ordered ? plan.tiles : 0);
  plan.sums_at = rounded_up(product({counts, sizeof(UInt32)}), 16);
  plan.own_bytes = sum({plan.sums_at, product({plan.tiles, sums_of(c).tile_numbers(), sizeof(float)})});
  plan.zero_bytes = c.ordered ? plan.sums_at : plan.own_bytes;
  return plan;
}

Step prepare_step(const Problem& p, const Plan& plan) {
  constexpr unsigned fewest_lanes = prepare_threads / prepare_queries;
  const PrepareConfig c{
      .o = gpu::element_of(p.o_type),
      .d_o = gpu::element_of(*p.d_o),
      .lanes = static_cast<int>(std::max(fewest_lanes, std::bit_ceil(static_cast<unsigned>(ceil_div(p.Dv, 8))))),
      .aligned = p.alignment == 16};
  Step step{.name = "mma_prepare",
            .unit = prepare_unit_text(c),
            .blocks = gpu::query_blocks(p, prepare_queries),
            .threads = prepare_threads};
  step.gives<PrepareParams>([plan, Dv = p.Dv](const Given& given) {
    return PrepareParams{
        .call = given.backward(), .Dv = static_cast<Int32>(Dv), .zero = given.own, .zeros = plan.zero_bytes / 16};
  });
  return step;
}

Step main_step(const Problem& p, const Plan& plan) {
  const OnePassConfig& c = plan.config;
  Step step{.name = "mma_one_pass",
            .unit = one_pass_unit_text(c),
            .blocks = plan.blocks,
            .threads = threads_of(c),
            .shared_bytes = layout_of(c).bytes,
            .tiles = text("tiles of ", keys_of(c), " keys x ", c.block_queries, " queries, dQ summed ",
                          !c.ordered          ? "as it comes"
                          : c.turn_tiles == 1 ? "in order, tile by tile"
                                              : text("in order, ", c.turn_tiles, " tiles at a time"))};
  step.gives<OnePassParams>([plan, D = p.D, Dv = p.Dv](const Given& given) {
    const gpu::BackwardParams& call = given.backward();
    const auto stride = [&](const gpu::TokenRef& t) {
      return TileStride{.advance = copy_rows_at_once(threads_of(plan.config)) * t.token,
                        .back = plan.config.block_queries * t.token};
    };
    return OnePassParams{.call = call,
                         .memory = plan.memory(given.own),
                         .Q = stride(call.x.q),
                         .dO = stride(call.d_o),
                         .D = static_cast<Int32>(D),
                         .Dv = static_cast<Int32>(Dv),
                         .factor = static_cast<float>(double{call.x.score_scale} * std::numbers::log2e),
                         .blocks_per_head = static_cast<Int32>(plan.blocks_per_head),
                         .section = plan.section};
  });
  return step;
}

Step finish_step(const Problem& p, const Plan& plan) {
  const QuerySums sums = sums_of(plan.config);
  const FinishConfig c{.D = sums.D,
                       .queries = sums.queries,
                       .warps = sums.warps,
                       .ordered = plan.config.ordered,
                       .dQ = gpu::element_of(*p.dq)};
  Step step{.name = "mma_finish",
            .unit = finish_unit_text(c),
            .blocks = gpu::query_blocks(p, c.queries),
            .threads = 32 * c.warps};
  step.gives<FinishParams>([plan, D = p.D](const Given& given) {
    return FinishParams{.call = given.backward(), .memory = plan.memory(given.own), .D = static_cast<Int32>(D)};
  });
  return step;
}

}  // namespace

std::string one_pass_unit_text(const OnePassConfig& c) {
  return gpu::UnitText{.file = "mma/kernel/one_pass.cuh",
                       .function = "tessera::mma::one_pass<config>",
                       .parameters = "tessera::mma::OnePassParams",
                       .config = config_text(c),
                       .launch_bounds = "tessera::mma::threads_of(config), config.blocks_per_sm"}
      .str();
}

Steps one_pass_steps(const Problem& p, const cuda::Target& target, std::optional<int> turn_tiles) {
  if (p.pass != Pass::backward) return Steps::refused("pass is forward; this kernel is for the backward pass");
  const TileClass* of = class_of(target);
  std::string reason = refusal(p, target, of);
  if (reason.empty()) reason = one_pass_refusal(p);
  if (!reason.empty()) return Steps::refused(std::move(reason));
  std::optional<OnePassConfig> tile = one_pass_tile(p, *of);
  if (!tile)
    return Steps::refused(
        text("D is ", p.D, " and Dv is ", p.Dv, "; one pass has no tile for them in the class of ", of->name));
  if (tile->ordered) tile->turn_tiles = turn_tiles.value_or(best_turn_tiles(p.options));
  const Plan plan = plan_of(p, *tile, target);
  constexpr std::int64_t most_tiles = std::numeric_limits<Int32>::max();
  if (std::max(plan.blocks, plan.tiles) > most_tiles)
    return Steps::refused(text("B is ", p.B, ", Hq is ", p.Hq, ", Nq is ", p.Nq, " and Nk is ", p.Nk, ", in ",
                               std::max(plan.blocks, plan.tiles), " tiles; one pass counts up to ", most_tiles));
  Steps steps(p);
  if (target.major == 9) steps.score_scale = gpu::corrected_scale(p, tile->halves_S);
  steps.own_bytes = plan.own_bytes;
  gpu::add_backward_start(steps, p, false);
  steps.add(prepare_step(p, plan));
  steps.add(main_step(p, plan));
  steps.add(finish_step(p, plan));
  gpu::add_sink_gradient(steps, p);
  return steps;
}

}  // namespace tessera::mma
