// Tiles, grids and workspace of the one-pass backward kernel; see one_pass_plan.hpp.
#include "sm90/one_pass_plan.hpp"

#include <algorithm>
#include <bit>

#include "core/failure.hpp"
#include "core/tensor.hpp"
#include "simt/arguments.hpp"
#include "sm90/plan.hpp"

namespace tessera::sm90 {
namespace {

// Tiles at other head dims: sums of dK and dV take half as many registers as D and Dv together, and what is left must
// hold the tile's S and dP.
constexpr OnePassConfig tiles[] = {
    {.D = 64, .Dv = 64, .block_queries = 128, .stages = 3},
    {.D = 128, .Dv = 128, .block_queries = 64, .stages = 3},
};

std::string one_pass_refusal(const Problem& p) {
  const Options& o = p.options;
  if (!p.dq || !p.dk || !p.dv) return "not all of dQ, dK and dV are asked for; one pass makes all of them";
  if (p.d_o != p.q_type)
    return text("dO is ", name_of(*p.d_o), " and Q is ", name_of(p.q_type), "; one pass takes both in one type");
  if (!(o.scale > 0)) return text("scale is ", o.scale, "; one pass takes scales above 0");
  if (o.softcap > 0) return text("softcap is ", o.softcap, "; one pass takes none");
  if (o.dropout > 0) return text("dropout is ", o.dropout, "; one pass takes none");
  if (p.slopes) return "ALiBi slopes are given; one pass takes none";
  if (p.bias) return "a bias is given; one pass takes none";
  if (p.mask) return "a mask tensor is given; one pass takes causal and window only";
  return "";
}

}  // namespace

OnePassPlan plan_one_pass(const Problem& p, const cuda::Target& target) {
  OnePassPlan plan;
  plan.reason = refusal(p, target);
  if (plan.reason.empty()) plan.reason = one_pass_refusal(p);
  if (!plan.reason.empty()) return plan;
  const auto* tile = std::find_if(std::begin(tiles), std::end(tiles),
                                  [&](const OnePassConfig& c) { return p.D <= c.D && p.Dv <= c.Dv; });
  if (tile == std::end(tiles)) {
    plan.reason = text("D is ", p.D, " and Dv is ", p.Dv, "; one pass has tiles up to 128");
    return plan;
  }
  OnePassConfig& c = plan.config;
  c = *tile;
  c.element = simt::element_of(p.q_type), c.dK = simt::element_of(*p.dk), c.dV = simt::element_of(*p.dv);
  c.ordered = p.options.deterministic;
  plan.o = simt::element_of(p.o_type), plan.dQ = simt::element_of(*p.dq);

  constexpr unsigned fewest_lanes = prepare_threads / prepare_rows;
  plan.prepare_lanes =
      static_cast<int>(std::max(fewest_lanes, std::bit_ceil(static_cast<unsigned>(ceil_div(p.Dv, 8)))));
  plan.prepare_blocks = simt::query_blocks(p, prepare_rows);
  plan.blocks = simt::key_blocks(p, one_pass_keys);
  plan.finish_blocks = simt::query_blocks(p, c.block_queries);
  plan.tiles_per_head = simt::block_count(p.packed, p.Nq, c.block_queries, p.B);

  const std::int64_t tiles_in_all = p.Hq * plan.tiles_per_head;
  plan.sums_at = round_up(static_cast<std::int64_t>(simt::workspace_bytes(p, {})), 128);
  plan.sums_bytes = tiles_in_all * parts_of(c) * part_numbers * std::int64_t{sizeof(float)};
  plan.counts_at = plan.sums_at + plan.sums_bytes;
  plan.counts_bytes = c.ordered ? round_up((tiles_in_all + 1) * std::int64_t{sizeof(UInt32)}, 16) : 0;
  plan.workspace_bytes = plan.counts_at + plan.counts_bytes;

  simt::add_backward_start(plan.start, p, false);
  simt::add_sink_gradient(plan.end, p);
  return plan;
}

Zeros zeros_of(const OnePassPlan& plan) {
  if (plan.config.ordered) return {plan.counts_at, plan.counts_bytes};
  return {plan.sums_at, plan.sums_bytes};
}

}  // namespace tessera::sm90
