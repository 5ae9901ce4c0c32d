// SPDX-License-Identifier: Apache-2.0
// Tiles and grids of the Hopper kernels; see plan.hpp.
#include "sm90/plan.hpp"

#include <algorithm>
#include <bit>
#include <numeric>

#include "core/failure.hpp"
#include "core/limits.hpp"
#include "core/tensor.hpp"
#include "gpu/arguments.hpp"
#include "sm90/layout.hpp"
#include "sm90/tiles.hpp"

namespace tessera::sm90 {

std::string refusal(const Problem& p, const cuda::Target& target) {
  if (target.major != 9) return text("the GPU is ", target.architecture(), "; this kernel needs sm_90a");
  if (p.q_type != Type::f16 && p.q_type != Type::bf16)
    return text("type is ", name_of(p.q_type), "; this kernel takes f16 and bf16");
  if (p.alignment < 16)
    return text("pointers and strides are aligned to ", p.alignment, " bytes; tensor copies need 16");
  if (p.far_strides)
    return "a stride is negative, or 2^40 bytes or more; tensor copies take strides from 0 to below that";
  // A carried call without keys asks for none.
  if (!p.carried() && (!p.has_queries() || !p.has_keys()))
    return text("B is ", p.B, ", Nq is ", p.Nq, ", Nk is ", p.Nk, ", Hq is ", p.Hq, " and Hk is ", p.Hk,
                "; tensor copies need at least one of each");
  constexpr std::int64_t most_counted = std::int64_t{1} << 29;  // positions and masks are in 32 bits
  if (std::max(p.Nq, p.Nk) > most_counted)
    return text("Nq is ", p.Nq, " and Nk is ", p.Nk, "; this kernel counts up to ", most_counted, " tokens");
  return "";
}

std::string refused_keys(const Problem& p) {
  if (!has_plain_keys(p)) return "k or v has another type than q, or scales; this kernel takes neither";
  if (p.pages && p.carried()) return "k and v are paged in a part of a problem; this kernel takes one or the other";
  if (p.pages && p.pages->size < least_page_size)
    return text("pages hold ", p.pages->size, " keys; tensor copies of them are too small below ", least_page_size);
  return "";
}

Boxes boxes_of(const Config& c, const Pages& pages) {
  const auto size = static_cast<std::uint64_t>(pages.size), keys = static_cast<std::uint64_t>(c.block_keys);
  // Without left padding, pieces begin and end at multiples of what divides both.
  const std::uint64_t step = pages.leftpad ? 1 : std::gcd(size, keys);
  // Older standard libraries give a width in the argument's own type.
  return {.first = std::countr_zero(step), .last = static_cast<int>(std::bit_width(std::min(size, keys))) - 1};
}

std::string tiles_refusal(const Problem& p, std::int64_t tiles) {
  if (tiles <= most_tiles) return "";
  return text("B is ", p.B, ", Hq is ", p.Hq, ", Hk is ", p.Hk, ", Nq is ", p.Nq, " and Nk is ", p.Nk, ", in ", tiles,
              " tiles; this kernel counts up to ", most_tiles);
}

bool copyable(const Tensor& o) {
  return alignment_of(o) == 16 && !has_far_stride(o) &&
         o.shape[static_cast<std::size_t>(o.ndim - 1)] % chunk_columns == 0;
}

double score_scale(const Problem& p) { return gpu::corrected_scale(p, halves_S(p)); }

ForwardPlan plan_forward(const Problem& p, const cuda::Target& target) {
  ForwardPlan plan;
  plan.reason = refusal(p, target);
  if (plan.reason.empty()) plan.reason = refused_keys(p);
  if (!plan.reason.empty()) return plan;
  const std::optional<Config> tile = forward_tile(p);
  if (!tile) {
    plan.reason = text("D is ", p.D, " and Dv is ", p.Dv, "; this kernel has tiles up to ", most_tile_dims);
    return plan;
  }
  plan.config = *tile;

  const int rows = rows_of(plan.config);
  const std::int64_t heads = p.packed ? p.Hq : p.B * p.Hq;
  const std::int64_t per_head = p.packed ? gpu::block_count(true, p.Nq, rows, p.B) : ceil_div(p.Nq, rows);
  plan.tiles = product({heads, per_head});
  plan.reason = tiles_refusal(p, plan.tiles);
  if (!plan.reason.empty()) return plan;
  plan.tiles_per_head = static_cast<int>(per_head);
  plan.varied = p.packed || p.pages || p.seqused_q || p.seqused_k || p.options.causal || p.options.window_left >= 0 ||
                p.options.window_right >= 0;
  // Heads that are worked on at the same time, a power of two that divides their number: no more than the cache holds K
  // and V of. Where all tiles are equal and large, one: neighbouring blocks stay in step, ask for the same keys at the
  // same time, and the chip makes one request of several before the L2 cache. Where tiles differ it takes more heads
  // for those at work to be nearly equal, and to read together.
  constexpr std::int64_t few = 16;
  const std::int64_t cached = product({gpu::heads_in_cache(target, p.Nk * (p.D + p.Dv) * 2), p.Hq / p.Hk});
  const std::int64_t equal = plan.config.D >= 128 ? 1 : std::min(cached, few);
  const std::int64_t most = plan.varied ? std::max(cached, few) : equal;
  while (2 * plan.section <= most && heads % (2 * plan.section) == 0) plan.section *= 2;
  plan.grid = static_cast<int>(std::min<std::int64_t>(plan.tiles, target.multiprocessors));
  return plan;
}

BackwardPlan plan_backward(const Problem& p, const cuda::Target& target) {
  BackwardPlan plan;
  plan.reason = refusal(p, target);
  if (plan.reason.empty() && p.d_o != p.q_type)
    plan.reason =
        text("dO is ", name_of(*p.d_o), " and Q is ", name_of(p.q_type), "; this kernel takes both in one type");
  if (!plan.reason.empty()) return plan;
  const std::optional<BackwardConfig> queries = backward_tile(p, Side::queries), keys = backward_tile(p, Side::keys);
  if (!queries || !keys) {
    plan.reason = text("D is ", p.D, " and Dv is ", p.Dv, "; this kernel has tiles up to ", most_tile_dims);
    return plan;
  }
  if (p.dq) plan.passes.push_back({*queries, gpu::query_blocks(p, rows_of(*queries))});
  if (p.dk || p.dv) plan.passes.push_back({*keys, gpu::key_blocks(p, rows_of(*keys))});
  for (const BackwardPlan::Pass& pass : plan.passes)
    if (plan.reason.empty()) plan.reason = tiles_refusal(p, pass.blocks);
  return plan;
}

}  // namespace tessera::sm90
