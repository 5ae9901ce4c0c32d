// Tiles and grids of the Hopper kernels; see plan.hpp.
#include "sm90/plan.hpp"

#include <algorithm>

#include "core/failure.hpp"
#include "core/tensor.hpp"
#include "simt/arguments.hpp"

namespace tessera::sm90 {
namespace {

// Tiles by head dims, smallest first; other dims get the next larger ones, padded with zeros in shared memory. More
// keys, or a second buffer more, would cost the registers that keep the tensor cores busy: the gate refuses what spills
// or waits.
constexpr Config table[] = {
    {.D = 64, .Dv = 64, .warpgroups = 3, .block_keys = 96, .stages = 2},
    {.D = 128, .Dv = 128, .warpgroups = 2, .block_keys = 128, .stages = 2},
    {.D = 192, .Dv = 128, .warpgroups = 2, .block_keys = 96, .stages = 2},
    {.D = 192, .Dv = 192, .warpgroups = 2, .block_keys = 64, .stages = 2},
    {.D = 256, .Dv = 256, .warpgroups = 2, .block_keys = 48, .stages = 2, .O_in_Q = true},
};

std::string refusal(const Problem& p, const cuda::Target& target) {
  const Options& o = p.options;
  if (p.pass != Pass::forward) return "the backward pass is asked for; this kernel is a forward kernel";
  if (target.major != 9) return text("the GPU is ", target.architecture(), "; this kernel needs sm_90a");
  if (p.q_type != Type::f16 && p.q_type != Type::bf16)
    return text("type is ", name_of(p.q_type), "; this kernel takes f16 and bf16");
  if (p.o_type != p.q_type) return text("o is ", name_of(p.o_type), "; this kernel writes q's type");
  if (p.bias) return "a bias is given; this kernel takes none";
  if (p.mask) return "a mask tensor is given; this kernel takes causal and window";
  if (p.slopes) return "ALiBi slopes are given; this kernel takes none";
  if (o.softcap > 0) return text("softcap is ", o.softcap, "; this kernel takes none");
  if (o.dropout > 0) return text("dropout is ", o.dropout, "; this kernel takes none");
  if (!(o.scale > 0)) return text("scale is ", o.scale, "; this kernel takes positive ones");
  if (p.alignment < 16)
    return text("pointers and strides are aligned to ", p.alignment, " bytes; tensor copies need 16");
  if (p.Nq == 0 || p.Nk == 0) return text("Nq is ", p.Nq, " and Nk is ", p.Nk, "; tensor copies need a token of each");
  return "";
}

}  // namespace

ForwardPlan plan_forward(const Problem& p, const cuda::Target& target) {
  ForwardPlan plan;
  plan.reason = refusal(p, target);
  if (!plan.reason.empty()) return plan;
  const auto* entry =
      std::find_if(std::begin(table), std::end(table), [&](const Config& c) { return p.D <= c.D && p.Dv <= c.Dv; });
  if (entry == std::end(table)) {
    plan.reason = text("D is ", p.D, " and Dv is ", p.Dv, "; this kernel has tiles up to 256");
    return plan;
  }
  plan.config = *entry;
  plan.config.element = simt::element_of(p.q_type);

  const int rows = rows_of(plan.config);
  const std::int64_t heads = p.packed ? p.Hq : p.B * p.Hq;
  plan.tiles_per_head = static_cast<int>(p.packed ? simt::block_count(true, p.Nq, rows, p.B) : ceil_div(p.Nq, rows));
  plan.tiles = heads * plan.tiles_per_head;
  // Heads whose K and V stay in the cache together; a power of two that divides their number.
  constexpr std::int64_t cache = 32 << 20;
  const std::int64_t head_bytes = p.Nk * (p.D + p.Dv) * 2;
  while (2 * plan.section * head_bytes <= cache && heads % (2 * plan.section) == 0) plan.section *= 2;
  // Where tiles have equal work, a block takes several, and begins to load the next while it finishes one.
  const bool varied = p.packed || p.seqused_q || p.seqused_k || p.options.causal || p.options.window_left >= 0 ||
                      p.options.window_right >= 0;
  plan.grid = static_cast<int>(varied ? plan.tiles : std::min<std::int64_t>(plan.tiles, target.multiprocessors));
  return plan;
}

}  // namespace tessera::sm90
