// SPDX-License-Identifier: Apache-2.0
// Plans of the `mma` kernels: what they refuse, their grids, units and parameter blocks; see algorithms.hpp.
#include <algorithm>
#include <numbers>
#include <tuple>

#include "core/failure.hpp"
#include "core/limits.hpp"
#include "core/tensor.hpp"
#include "gpu/unit.hpp"
#include "mma/algorithms.hpp"
#include "mma/params.hpp"
#include "mma/plan.hpp"

namespace tessera::mma {
namespace {

using gpu::Given;
using gpu::Step;
using gpu::Steps;

using gpu::spelled;

std::string config_text(const Config& c) {
  return text("tessera::mma::Config config{.D = ", c.D, ", .Dv = ", c.Dv, ", .element = ", spelled(c.element),
              ", .o = ", spelled(c.o), ", .warps = ", c.warps, ", .row_tiles = ", c.row_tiles,
              ", .block_keys = ", c.block_keys, ", .stages = ", c.stages,
              ", .spreads_copies = ", spelled(c.spreads_copies), ", .q_registers = ", spelled(c.q_registers),
              ", .blocks_per_sm = ", c.blocks_per_sm, ", .copy_bytes = ", c.copy_bytes, ", .whole = ", spelled(c.whole),
              ", .paged = ", spelled(c.paged), ", .k = ", spelled(c.k), ", .v = ", spelled(c.v),
              ", .scaled = ", spelled(c.scaled), ", .halves_S = ", spelled(c.halves_S),
              ", .turing = ", spelled(c.turing), ", .general = ", spelled(c.general),
              ", .options = ", spelled(c.options), "}");
}

std::string config_text(const BackwardConfig& c) {
  return text(
      "tessera::mma::BackwardConfig config{.side = tessera::gpu::Side::", c.side == Side::queries ? "queries" : "keys",
      ", .D = ", c.D, ", .Dv = ", c.Dv, ", .element = ", spelled(c.element), ", .dX = ", spelled(c.dX),
      ", .dY = ", spelled(c.dY), ", .warps = ", c.warps, ", .row_tiles = ", c.row_tiles,
      ", .block_columns = ", c.block_columns, ", .stages = ", c.stages, ", .blocks_per_sm = ", c.blocks_per_sm,
      ", .copy_bytes = ", c.copy_bytes, ", .whole = ", spelled(c.whole), ", .halves_S = ", spelled(c.halves_S),
      ", .turing = ", spelled(c.turing), ", .general = ", spelled(c.general), ", .options = ", spelled(c.options), "}");
}

}  // namespace

std::string refusal(const Problem& p, const cuda::Target& target, const TileClass* of) {
  if (p.q_type != Type::f16 && p.q_type != Type::bf16)
    return text("type is ", name_of(p.q_type), "; this kernel takes f16 and bf16");
  if (!of && !wanted_class().empty())
    return text("TESSERA_TILES is '", wanted_class(), "'; must be one of ", class_names());
  if (!of) return text("the GPU is ", target.architecture(), "; this kernel has tiles for ", class_names());
  if (of->shared_bytes > target.shared_bytes)
    return text("the tiles of ", of->name, " take up to ", of->shared_bytes, " bytes of shared memory; ",
                target.architecture(), " has ", target.shared_bytes);
  if (of->turing() && p.q_type == Type::bf16) return text("type is bf16; ", of->name, " multiplies f16 only");
  if (p.D > most_tile_dims || p.Dv > most_tile_dims)
    return text("D is ", p.D, " and Dv is ", p.Dv, "; this kernel has tiles up to ", most_tile_dims);
  constexpr std::int64_t most_counted = std::int64_t{1} << 29;  // positions and masks are in 32 bits
  if (std::max(p.Nq, p.Nk) > most_counted)
    return text("Nq is ", p.Nq, " and Nk is ", p.Nk, "; this kernel counts up to ", most_counted, " tokens");
  return "";
}

int section_of(std::int64_t heads, std::int64_t most) {
  int section = 1;
  while (2 * section <= most && heads % (2 * section) == 0) section *= 2;
  return section;
}

namespace {

// No more than the cache holds K and V of, but some, so that their blocks are equally long when causal.
std::int64_t most_heads(const Problem& p) {
  constexpr std::int64_t cache = 32 << 20, few = 4;
  const std::int64_t bytes = std::max<std::int64_t>(1, p.Nk * (p.D + p.Dv) * 2);
  return std::max(cache / bytes * p.heads_per_kv(), few);
}

ForwardParams forward_params(const Problem& p, std::int64_t per_head, std::int64_t heads, const Given& given) {
  const bool even = !p.packed && !p.seqused_q && !p.seqused_k;
  const gpu::ForwardParams& call = given.forward();
  const gpu::DeviceSequence every = even ? gpu::sequence_of(call.x, 0) : gpu::DeviceSequence{};
  return {.call = call,
          .D = static_cast<Int32>(p.D),
          .Dv = static_cast<Int32>(p.Dv),
          .factor = static_cast<float>(double{call.x.score_scale} * std::numbers::log2e),
          .tiles_per_head = static_cast<Int32>(per_head),
          .section = section_of(heads, most_heads(p)),
          .even = even,
          .queries = static_cast<Int32>(every.nq),
          .keys = static_cast<Int32>(every.nk),
          .shift = every.shift,
          .low = every.mask.low,
          .high = every.mask.high};
}

// Of sequences with so many queries, or more.
PagedParams paged_params(const Problem& p, std::int64_t least_queries, const ForwardParams& plain, const Call& call) {
  PagedParams out{plain,
                  gpu::page_tables(p, call),
                  gpu::scale_ref(call.inputs.k_scale),
                  gpu::scale_ref(call.inputs.v_scale),
                  {p.longest_q(), p.longest_k()},
                  static_cast<Int32>(least_queries)};
  out.call.x.k = gpu::page_ref(call.inputs.k), out.call.x.v = gpu::page_ref(call.inputs.v);
  return out;
}

// What of a cache's keys the forward kernel does not take; empty: nothing.
std::string refused_keys(const Problem& p) {
  if (!p.pages && !has_plain_keys(p))
    return "k or v has another type than q, or scales; this kernel takes that of keys in pages";
  for (const auto& [name, type, scale] : {std::tuple{"k", p.k_type, p.k_scale}, std::tuple{"v", p.v_type, p.v_scale}}) {
    if (type != p.q_type && type != Type::e4m3 && type != Type::i8)
      return text(name, " has type ", name_of(type), "; this kernel takes q's, ", name_of(p.q_type), ", e4m3 and i8");
    if (scale > 2)
      return text(name, "_scale has ", scale, " dimensions; this kernel takes one for each head, or sequence and head");
  }
  return "";
}

// Sequences with fewer queries are left to other launches.
Steps forward_steps(const Problem& p, const cuda::Target& target, std::int64_t least_queries) {
  if (p.pass != Pass::forward) return Steps::refused("pass is backward; this kernel is for the forward pass");
  const TileClass* of = class_of(target);
  if (std::string reason = refusal(p, target, of); !reason.empty()) return Steps::refused(std::move(reason));
  if (std::string reason = refused_keys(p); !reason.empty()) return Steps::refused(std::move(reason));
  const Config c = *forward_tile(p, *of);
  const int rows = rows_of(c);
  const std::int64_t heads = p.packed ? p.Hq : p.B * p.Hq;
  const std::int64_t per_head = p.packed ? gpu::block_count(true, p.Nq, rows, p.B) : ceil_div(p.Nq, rows);

  Steps steps(p);
  // What other GPUs' tensor cores lose has not been measured.
  if (target.major == 9) steps.score_scale = gpu::corrected_scale(p, c.halves_S);
  Step step{.name = "mma_forward",
            .unit = forward_unit_text(c),
            .blocks = p.has_queries() ? product({heads, per_head}) : 0,
            .threads = threads_of(c),
            .shared_bytes = layout_of(c).bytes,
            .tiles = text("tiles of ", rows, " queries x ", c.block_keys, " keys", c.paged ? " in pages" : "")};
  const auto plain = [p, per_head, heads](const Given& given) { return forward_params(p, per_head, heads, given); };
  if (c.paged)
    step.gives<PagedParams>(
        [=](const Given& given) { return paged_params(p, least_queries, plain(given), given.call); });
  else
    step.gives<ForwardParams>(plain);
  steps.add(std::move(step));
  return steps;
}

// --- backward

// One launch: the gradients of one side. False: no tile fits.
bool add_gradients(Steps& steps, const Problem& p, const TileClass& of, Side side, bool dX, bool dY) {
  const std::optional<BackwardConfig> c = backward_tile(p, of, side, dX, dY);
  if (!c) return false;
  const bool queries = side == Side::queries;
  const int rows = rows_of(*c);
  const std::int64_t heads = (queries ? p.Hq : p.Hk) * (p.packed ? 1 : p.B), N = queries ? p.Nq : p.Nk;
  const std::int64_t per_head = p.packed ? gpu::block_count(true, N, rows, p.B) : ceil_div(N, rows);
  Step step{.name = queries ? "mma_backward_queries" : "mma_backward_keys",
            .unit = backward_unit_text(*c),
            .blocks = (queries ? p.has_queries() : p.has_keys()) ? product({heads, per_head}) : 0,
            .threads = threads_of(*c),
            .shared_bytes = layout_of(*c).bytes,
            .tiles = text("tiles of ", rows, queries ? " queries x " : " keys x ", c->block_columns,
                          queries ? " keys" : " queries")};
  step.gives<BackwardParams>(
      [D = p.D, Dv = p.Dv, per_head, section = section_of(heads, most_heads(p))](const Given& given) {
        const gpu::BackwardParams& call = given.backward();
        return BackwardParams{.call = call,
                              .D = static_cast<Int32>(D),
                              .Dv = static_cast<Int32>(Dv),
                              .factor = static_cast<float>(double{call.x.score_scale} * std::numbers::log2e),
                              .tiles_per_head = static_cast<Int32>(per_head),
                              .section = section};
      });
  steps.add(std::move(step));
  return true;
}

Steps backward_steps(const Problem& p, const cuda::Target& target, gpu::AddSteps bias_gradient) {
  if (p.pass != Pass::backward) return Steps::refused("pass is forward; this kernel is for the backward pass");
  const TileClass* of = class_of(target);
  if (std::string reason = refusal(p, target, of); !reason.empty()) return Steps::refused(std::move(reason));
  if (p.d_o != p.q_type)
    return Steps::refused(
        text("dO is ", name_of(*p.d_o), " and Q is ", name_of(p.q_type), "; this kernel takes both in one type"));
  Steps steps(p);
  if (target.major == 9) steps.score_scale = gpu::corrected_scale(p, p.q_type == Type::f16 && p.D > 128);
  gpu::add_backward_start(steps, p);
  const bool dk = p.dk.has_value(), dv = p.dv.has_value();
  bool fits = !p.dq || add_gradients(steps, p, *of, Side::queries, true, false);
  // dK and dV in two launches where both are more than a thread's registers hold.
  if (dk && dv && backward_tile(p, *of, Side::keys, true, true)) {
    fits = add_gradients(steps, p, *of, Side::keys, true, true) && fits;
  } else {
    if (dk) fits = add_gradients(steps, p, *of, Side::keys, true, false) && fits;
    if (dv) fits = add_gradients(steps, p, *of, Side::keys, false, true) && fits;
  }
  if (!fits)
    return Steps::refused(text("D is ", p.D, " and Dv is ", p.Dv, "; no tile fits the ", of->shared_bytes,
                               " bytes of shared memory of ", of->name));
  bias_gradient(steps, p, target);
  gpu::add_sink_gradient(steps, p);
  return steps;
}

}  // namespace

std::string backward_unit_text(const BackwardConfig& c) {
  return gpu::UnitText{.file = "mma/kernel/backward.cuh",
                       .function = "tessera::mma::backward<config>",
                       .parameters = "tessera::mma::BackwardParams",
                       .config = config_text(c),
                       .launch_bounds = "tessera::mma::threads_of(config), config.blocks_per_sm"}
      .str();
}

std::string forward_unit_text(const Config& c) {
  return gpu::UnitText{.file = "mma/kernel/forward.cuh",
                       .function = "tessera::mma::forward<config>",
                       .parameters = c.paged ? "tessera::mma::PagedParams" : "tessera::mma::ForwardParams",
                       .config = config_text(c),
                       .launch_bounds = "tessera::mma::threads_of(config), config.blocks_per_sm"}
      .str();
}

std::vector<gpu::Algorithm> algorithms(gpu::AddSteps bias_gradient, gpu::AddSteps few_rows) {
  constexpr const char* by_name =
      "this kernel has not passed all of its tests on a GPU yet; a call gets it if it asks for it by name";
  const auto forward = [](const Problem& p, const cuda::Target& target) { return forward_steps(p, target, 1); };
  const auto mixed = [few_rows](const Problem& p, const cuda::Target& target) {
    return gpu::mixed_steps(p, target, "mma", forward_steps, few_rows);
  };
  const auto backward = [bias_gradient](const Problem& p, const cuda::Target& target) {
    return backward_steps(p, target, bias_gradient);
  };
  const auto one_pass = [](const Problem& p, const cuda::Target& target) { return one_pass_steps(p, target); };
  return {{.name = "mma_mixed", .family = "mma", .plan = mixed, .by_name = by_name, .caches = gpu::Caches::keys},
          {.name = "mma", .family = "mma", .plan = forward, .by_name = by_name, .caches = gpu::Caches::keys},
          {.name = "mma_one_pass", .family = "mma", .plan = one_pass, .by_name = by_name},
          {.name = "mma_two_pass", .family = "mma", .plan = backward, .by_name = by_name}};
}

}  // namespace tessera::mma
