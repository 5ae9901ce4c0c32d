// Tiles, grids and workspace of the one-pass backward kernel; see one_pass_plan.hpp.
#include "sm90/one_pass_plan.hpp"

#include <algorithm>
#include <bit>

#include "core/failure.hpp"
#include "core/limits.hpp"
#include "core/tensor.hpp"
#include "gpu/arguments.hpp"
#include "sm90/plan.hpp"

namespace tessera::sm90 {
namespace {

// Tiles at other head dims: sums of dK and dV take half as many registers as D and Dv together, and what is left must
// hold the tile's S and dP.
constexpr OnePassConfig tiles[] = {
    {.D = 64, .Dv = 64, .block_queries = 128},
    {.D = 128, .Dv = 128, .block_queries = 64},
};

std::string one_pass_refusal(const Problem& p) {
  const Options& o = p.options;
  if (!p.dq || !p.dk || !p.dv) return "not all of dQ, dK and dV are asked for; one pass makes all of them";
  if (p.d_o != p.q_type)
    return text("dO is ", name_of(*p.d_o), " and Q is ", name_of(p.q_type), "; one pass takes both in one type");
  if (!(o.scale > 0)) return text("scale is ", o.scale, "; one pass takes scales above 0");
  if (const std::string option = score_option_text(p); !option.empty()) return option + "; one pass takes none";
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
    plan.reason = text("D is ", p.D, " and Dv is ", p.Dv, "; one pass has tiles up to ", one_pass_tile_dims);
    return plan;
  }
  OnePassConfig& c = plan.config;
  c = *tile;
  c.element = gpu::element_of(p.q_type), c.dK = gpu::element_of(*p.dk), c.dV = gpu::element_of(*p.dv);
  c.ordered = p.options.deterministic;
  plan.o = gpu::element_of(p.o_type), plan.dQ = gpu::element_of(*p.dq);

  const unsigned fewest_lanes = static_cast<unsigned>(prepare_threads / c.block_queries);
  plan.prepare_lanes =
      static_cast<int>(std::max(fewest_lanes, std::bit_ceil(static_cast<unsigned>(ceil_div(p.Dv, 8)))));
  plan.blocks = gpu::key_blocks(p, one_pass_keys);
  plan.grid = std::min<std::int64_t>(plan.blocks, target.multiprocessors);
  plan.query_blocks = gpu::query_blocks(p, c.block_queries);
  plan.tiles_per_head = gpu::block_count(p.packed, p.Nq, c.block_queries, p.B);

  const std::int64_t tiles_in_all = product({p.Hq, plan.tiles_per_head});
  plan.reason = tiles_refusal(p, std::max(plan.blocks, tiles_in_all));
  if (!plan.reason.empty()) return plan;
  // So few tiles have a workspace whose size is far inside 64 bits.
  std::int64_t end = 0;
  const auto take = [&](std::int64_t bytes) {
    const OnePassPlan::Part part{round_up(end, 16), round_up(bytes, 16)};
    end = part.at + part.bytes;
    return part;
  };
  plan.sums = take(tiles_in_all * parts_of(c) * part_bytes);
  plan.counts = take((1 + (c.ordered ? tiles_in_all : 0)) * std::int64_t{sizeof(UInt32)});
  plan.numbers = take(tiles_in_all * numbers_of(c) * std::int64_t{sizeof(float)});
  plan.works = take(plan.blocks * one_pass_work_bytes);
  plan.own_bytes = end;
  return plan;
}

OnePassPlan::Part OnePassPlan::zeros() const {
  return config.ordered ? counts : Part{sums.at, counts.at + counts.bytes - sums.at};
}

OnePassMemory memory_of(const OnePassPlan& plan, void* own) {
  auto* base = static_cast<char*>(own);
  auto* counts = reinterpret_cast<UInt32*>(base + plan.counts.at);
  return {.sums = reinterpret_cast<float*>(base + plan.sums.at),
          .numbers = reinterpret_cast<float*>(base + plan.numbers.at),
          .counts = counts + 1,
          .taken = counts,
          .works = base + plan.works.at,
          .blocks = static_cast<Int32>(plan.blocks),
          .tiles_per_head = static_cast<Int32>(plan.tiles_per_head)};
}

}  // namespace tessera::sm90
