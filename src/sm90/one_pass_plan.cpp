// SPDX-License-Identifier: Apache-2.0
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

// Sections of about `wanted` of so many heads, at least `least`: fewer or more if that leaves no small section at the
// end, where too few heads would be at work.
std::int64_t section_of(std::int64_t heads, std::int64_t wanted, std::int64_t least) {
  if (wanted >= heads) return heads;
  for (std::int64_t size = wanted; size >= std::max(least, wanted / 2); --size)
    if (heads % size == 0) return size;
  for (std::int64_t size = wanted; size <= std::min(heads, wanted * 3 / 2); ++size)
    if (heads % size == 0) return size;
  return wanted;
}

// Few heads at once: what their works share should stay in the L2 cache, which is Q, dO and the sums of dQ of the query
// head that they are at. But works that add in order wait for each other, the more the more of them are of one head. So
// there are at least as many heads as it takes for a head's works to come to a tile one after another: the grid holds
// grid / heads of them, and each has `tiles` tiles. Under a causal mask works differ, and those that began together
// also end together: groups of heads overlap, in different phases. Where a block of keys is longer than a tile of
// queries, a group fills the grid, and three are at work; otherwise it takes more heads, in more phases. Which is
// better was measured (docs/experiments.md, "The order of works"). Where heads share keys all of them are at a tile
// before the next one, and half as many heads of K and V are enough.
WorkOrder order_of_works(const Problem& p, const OnePassPlan& plan, const cuda::Target& target) {
  const OnePassConfig& c = plan.config;
  const std::int64_t all = p.packed ? p.Hk : p.B * p.Hk, blocks = plan.blocks / all;
  const auto order = [&](std::int64_t together, std::int64_t stagger) {
    return WorkOrder{.heads = static_cast<Int32>(all),
                     .blocks = static_cast<Int32>(blocks),
                     .together = static_cast<Int32>(together),
                     .stagger = static_cast<Int32>(stagger)};
  };
  if (p.packed) return order(all, blocks);  // the blocks of all sequences
  const auto whole_sequences = [&](std::int64_t least) {
    return std::min<std::int64_t>(all, ceil_div(least, p.Hk) * p.Hk);
  };
  const std::int64_t usual = whole_sequences(16);
  const std::int64_t tiles = ceil_div(p.Nq, std::int64_t{c.block_queries});
  const std::int64_t head_bytes = p.Nq * (2 * (p.D + p.Dv) + std::int64_t{sizeof(float)} * c.D);
  const std::int64_t cached = gpu::heads_in_cache(target, head_bytes);
  if (c.ordered && p.options.causal && p.options.window_left < 0) {
    constexpr std::int64_t grids = 4, long_head = 8, phases = 3;
    if (p.Hq > p.Hk) return order(whole_sequences(8), blocks);
    if (c.block_queries < one_pass_keys)
      return order(std::max<std::int64_t>(1, plan.grid / blocks), ceil_div(blocks, phases));
    const std::int64_t heads = std::max<std::int64_t>(ceil_div(grids * plan.grid, tiles), cached);
    if (blocks < long_head || heads >= all) return order(usual, blocks);
    return order(ceil_div(heads, blocks), ceil_div(blocks, heads));
  }
  const std::int64_t least = std::max<std::int64_t>(2, c.ordered ? ceil_div(plan.grid, tiles) : 0);
  return order(section_of(all, std::min(usual, std::max(least, cached)), least), blocks);
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
  plan.order = order_of_works(p, plan, target);
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
