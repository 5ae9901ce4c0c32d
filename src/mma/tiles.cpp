// SPDX-License-Identifier: Apache-2.0
// Tile choices; see tiles.hpp. The compile gate refuses tiles that spill registers.
#include "mma/tiles.hpp"

#include <algorithm>
#include <utility>

#include "core/environment.hpp"
#include "core/failure.hpp"
#include "core/once.hpp"
#include "gpu/arguments.hpp"

namespace tessera::mma {
namespace {

// By class, the smallest head dims first; a problem gets the first tile that holds it. Where a multiprocessor
// multiplies 1024 times a clock (sm_80, sm_90), shared memory limits: 32 rows of a warp use each fragment of K and V
// twice. Where it is half that or less, more warps of 16 rows hide latencies better, with Q in registers.
constexpr Config class_227[] = {
    {.D = 64, .Dv = 64, .block_keys = 128},
    {.D = 128, .Dv = 128},
    {.D = 192, .Dv = 128, .stages = 1},
    {.D = 192, .Dv = 192, .warps = 8, .row_tiles = 1, .spreads_copies = true, .blocks_per_sm = 1},
    {.D = 256, .Dv = 256, .row_tiles = 1, .stages = 1},
};
// The same; for sm_100 the compiler needs more registers.
constexpr Config class_100[] = {
    {.D = 64, .Dv = 64},
    {.D = 128, .Dv = 128, .block_keys = 48},
    {.D = 192, .Dv = 128, .stages = 1},
    {.D = 192, .Dv = 192, .warps = 8, .row_tiles = 1, .blocks_per_sm = 1},
    {.D = 256, .Dv = 256, .warps = 8, .row_tiles = 1, .blocks_per_sm = 1},
};
constexpr Config class_163[] = {
    {.D = 64, .Dv = 64, .block_keys = 128, .stages = 1},
    {.D = 128, .Dv = 128, .block_keys = 48},
    {.D = 192, .Dv = 192, .warps = 8, .row_tiles = 1, .blocks_per_sm = 1},
    {.D = 256, .Dv = 256, .warps = 8, .row_tiles = 1, .stages = 1, .blocks_per_sm = 1},
};
constexpr Config class_99[] = {
    {.D = 64, .Dv = 64, .warps = 8, .row_tiles = 1, .q_registers = true},
    {.D = 128, .Dv = 128, .warps = 8, .row_tiles = 1, .q_registers = true, .blocks_per_sm = 1},
    {.D = 192, .Dv = 192, .warps = 8, .row_tiles = 1, .stages = 1, .blocks_per_sm = 1},
    {.D = 256, .Dv = 256, .warps = 8, .row_tiles = 1, .block_keys = 32, .stages = 1, .blocks_per_sm = 1},
};
constexpr Config class_64[] = {
    {.D = 64, .Dv = 64, .block_keys = 32, .stages = 1},
    {.D = 128, .Dv = 128, .warps = 8, .row_tiles = 1, .block_keys = 32, .stages = 1, .blocks_per_sm = 1},
    {.D = 256, .Dv = 192, .row_tiles = 1, .block_keys = 32, .stages = 1, .blocks_per_sm = 1},
    {.D = 256, .Dv = 256, .row_tiles = 1, .block_keys = 16, .stages = 1, .blocks_per_sm = 1},
};

// All gradients in one pass. 32 keys of a warp where dK and dV leave registers for that; two warps share the keys where
// one could not hold both.
constexpr OnePassConfig one_pass_227[] = {
    {.D = 64, .Dv = 64},
    {.D = 128, .Dv = 128, .paired = true, .block_queries = 64, .blocks_per_sm = 1},
    {.D = 256, .Dv = 256, .row_tiles = 1, .paired = true, .block_queries = 64, .o_stages = 1, .blocks_per_sm = 1},
};
constexpr OnePassConfig one_pass_163[] = {
    {.D = 64, .Dv = 64},
    {.D = 128, .Dv = 128, .warps = 8, .row_tiles = 1, .block_queries = 64, .blocks_per_sm = 1},
    {.D = 256,
     .Dv = 256,
     .row_tiles = 1,
     .paired = true,
     .block_queries = 64,
     .q_stages = 1,
     .o_stages = 1,
     .blocks_per_sm = 1},
};

// A single stage leaves room for 128 keys at D = 128, which halves what is added to dQ in memory. At D = 256 there is
// room for 32 keys.
constexpr OnePassConfig one_pass_99[] = {
    {.D = 64, .Dv = 64, .warps = 8, .row_tiles = 1, .block_queries = 64, .blocks_per_sm = 1},
    {.D = 128, .Dv = 128, .warps = 8, .row_tiles = 1, .q_stages = 1, .o_stages = 1, .blocks_per_sm = 1},
    {.D = 256, .Dv = 256, .warps = 2, .row_tiles = 1, .paired = true, .o_stages = 1, .blocks_per_sm = 1},
};
// Copies are not asynchronous, so a second stage would hide nothing; at D = 64 a second block does.
constexpr OnePassConfig one_pass_64[] = {
    {.D = 64, .Dv = 64, .row_tiles = 1, .q_stages = 1, .o_stages = 1},
    {.D = 128, .Dv = 128, .row_tiles = 1, .q_stages = 1, .o_stages = 1, .blocks_per_sm = 1},
};

constexpr TileClass classes[] = {{"sm_100", 10, 0, 227 << 10, class_100, one_pass_227},
                                 {"sm_90", 9, 0, 227 << 10, class_227, one_pass_227},
                                 {"sm_80", 8, 0, 163 << 10, class_163, one_pass_163},
                                 {"sm_89", 8, 0, 99 << 10, class_99, one_pass_99},
                                 {"sm_75", 7, 5, 64 << 10, class_64, one_pass_64}};

}  // namespace

std::span<const TileClass> tile_classes() { return classes; }

std::string class_names() {
  std::string names;
  for (const TileClass& c : classes) names += text(names.empty() ? "" : ", ", c.name);
  return names;
}

const std::string& wanted_class() {
  static constinit Once<const std::string> wanted;  // read once: plans are cached
  return wanted.get([] {
    const char* value = environment("TESSERA_TILES");
    return std::string(value ? value : "");
  });
}

const TileClass* class_of(const cuda::Target& target) {
  const auto find = [](auto fits) {
    const auto found = std::ranges::find_if(classes, fits);
    return found == std::end(classes) ? nullptr : &*found;
  };
  if (const std::string& name = wanted_class(); !name.empty())
    return find([&](const TileClass& c) { return c.name == name; });
  return find([&](const TileClass& c) {
    return std::pair(c.major, c.minor) <= std::pair(target.major, target.minor) &&
           c.shared_bytes <= target.shared_bytes;
  });
}

std::optional<Config> forward_tile(const Problem& p, const TileClass& of) {
  const auto row = std::ranges::find_if(of.tiles, [&](const Config& c) { return p.D <= c.D && p.Dv <= c.Dv; });
  if (row == of.tiles.end()) return {};
  Config c = *row;
  const bool wide = c.D > 128 || c.Dv > 128;
  c.turing = of.turing();
  c.element = gpu::element_of(p.q_type), c.o = gpu::element_of(p.o_type);
  c.D = static_cast<int>(round_up(p.D, 16)), c.Dv = static_cast<int>(round_up(p.Dv, 16));
  c.whole = c.D == p.D && c.Dv == p.Dv;
  c.copy_bytes = p.alignment;
  c.paged = p.pages.has_value();
  if (p.k_type != p.q_type) c.k = gpu::element_of(p.k_type);
  if (p.v_type != p.q_type) c.v = gpu::element_of(p.v_type);
  c.scaled = p.k_scale > 0 || p.v_scale > 0;
  const bool converts = c.k != Element::none || c.v != Element::none;
  if (converts) c.spreads_copies = false;  // they are not asynchronous
  c.options = gpu::score_config(p);
  c.general = c.options.any() || !(p.options.scale > 0);
  c.halves_S = p.q_type == Type::f16 && p.D > 128;
  if (c.halves_S) c.block_keys = std::min(c.block_keys, 32);  // twice the accumulators
  // Pages need registers, and conversions do.
  if (c.paged && (wide || converts) && c.row_tiles == 2) c.warps = 8, c.row_tiles = 1, c.blocks_per_sm = 1;
  if (c.general) {
    // Options need registers, which rows and keys of a warp give.
    c.row_tiles = 1, c.q_registers = c.spreads_copies = false;
    c.block_keys = std::min(c.block_keys, wide ? 16 : 32);
    c.blocks_per_sm = 1;
  }
  return c;
}

// Warps, columns, stages and blocks, best first. Two blocks of a multiprocessor hide each other's latencies.
struct BackwardShape {
  int warps, columns, stages, blocks;
};
static constexpr BackwardShape backward_shapes[] = {{4, 64, 2, 2}, {4, 32, 2, 2}, {8, 32, 2, 1}, {8, 32, 1, 1},
                                                    {4, 32, 2, 1}, {4, 32, 1, 1}, {4, 16, 1, 1}};

std::optional<BackwardConfig> backward_tile(const Problem& p, const TileClass& of, Side side, bool dX, bool dY) {
  BackwardConfig c{.side = side, .element = gpu::element_of(p.q_type)};
  const auto element = [](bool wanted, const std::optional<Type>& type) {
    return wanted ? gpu::element_of(*type) : Element::none;
  };
  c.dX = element(dX, side == Side::queries ? p.dq : p.dk), c.dY = element(dY, p.dv);
  c.D = static_cast<int>(round_up(p.D, 16)), c.Dv = static_cast<int>(round_up(p.Dv, 16));
  c.whole = c.D == p.D && c.Dv == p.Dv;
  c.copy_bytes = p.alignment, c.turing = of.turing();
  c.options = gpu::score_config(p);
  c.general = c.options.any() || !(p.options.scale > 0);
  c.halves_S = p.q_type == Type::f16 && p.D > 128;
  // A thread's accumulators: of the gradients, and of S and dP. More of them spill, and options need registers too.
  const int sums = (dX ? c.D / 2 : 0) + (dY ? c.Dv / 2 : 0);
  if (sums > 128) return {};  // dK and dV then take two launches
  const int most_columns = c.general ? (sums > 64 ? 16 : 32) : c.halves_S ? 32 : 64;
  for (const BackwardShape& shape : backward_shapes) {
    c.warps = shape.warps, c.block_columns = shape.columns, c.stages = shape.stages, c.blocks_per_sm = shape.blocks;
    if (c.general) c.blocks_per_sm = 1;
    c.block_columns = std::min(c.block_columns, most_columns);
    constexpr int reserved = 1024;
    if ((layout_of(c).bytes + reserved) * c.blocks_per_sm <= of.shared_bytes + reserved) return c;
  }
  return {};
}

std::optional<OnePassConfig> one_pass_tile(const Problem& p, const TileClass& of) {
  const auto row =
      std::ranges::find_if(of.one_pass, [&](const OnePassConfig& c) { return p.D <= c.D && p.Dv <= c.Dv; });
  if (row == of.one_pass.end()) return {};
  OnePassConfig c = *row;
  c.element = gpu::element_of(p.q_type), c.dK = gpu::element_of(*p.dk), c.dV = gpu::element_of(*p.dv);
  c.Dv = static_cast<int>(round_up(p.Dv, 16));
  c.whole = c.D == p.D && c.Dv == p.Dv;
  c.copy_bytes = p.alignment;
  c.halves_S = p.q_type == Type::f16 && p.D > 128;
  c.turing = of.turing();
  c.ordered = p.options.deterministic;
  if (c.halves_S && !c.ordered) c.block_queries = 32;  // twice the accumulators of S; the compiler spills without turns
  return c;
}

}  // namespace tessera::mma
