// SPDX-License-Identifier: Apache-2.0
// Tile choices; see tiles.hpp. Figures: TFLOP/s of the forward pass on an H200, 16k tokens, hidden size 2048, bf16,
// from docs/experiments.md, "Tiles of hopper". The compile gate refuses tiles that spill registers or make wgmma wait.
#include "sm90/tiles.hpp"

#include <algorithm>
#include <span>

#include "gpu/arguments.hpp"

namespace tessera::sm90 {
namespace {

// Head dims that are not here get the next larger ones, filled up with zeros in shared memory.
constexpr Config plain[] = {
    // 96 keys: 331 at N=512, 485 at 2048, 567 at 16384; 80 keys: 333, 473, 555; 64 keys: 346, 463, 529.
    {.D = 64, .Dv = 64, .warpgroups = 3, .block_keys = 96, .stages = 4, .q_stages = 2},
    // 128 keys: 469 at N=512, 673 at 2048, 772 at 8192; 96 keys: 435, 622, 713.
    {.D = 128, .Dv = 128, .warpgroups = 2, .block_keys = 128, .stages = 2, .q_stages = 2},
    {.D = 192, .Dv = 128, .warpgroups = 2, .block_keys = 96, .stages = 2},
    {.D = 192, .Dv = 192, .warpgroups = 2, .block_keys = 80, .stages = 2},
    // 64 keys: 487 at N=512, 668 at 2048, 739 at 16384; 48 keys, which leave O room in shared memory: 489, 644, 689.
    {.D = 256, .Dv = 256, .warpgroups = 2, .block_keys = 64, .stages = 2, .stages_O = false},
};

// Where S is the sum of two products.
constexpr Config halved[] = {
    {.D = 192, .Dv = 128, .block_keys = 96, .stages = 2, .p_buffers = 1, .halves_S = true},
    {.D = 192, .Dv = 192, .block_keys = 64, .stages = 2, .p_buffers = 1, .halves_S = true},
    {.D = 256, .Dv = 256, .block_keys = 48, .stages = 3, .p_buffers = 1, .stages_O = false, .halves_S = true},
};

template <class AnyConfig>
const AnyConfig* fitting(const Problem& p, std::span<const AnyConfig> tiles) {
  const auto found =
      std::find_if(tiles.begin(), tiles.end(), [&](const AnyConfig& c) { return p.D <= c.D && p.Dv <= c.Dv; });
  return found == tiles.end() ? nullptr : &*found;
}

// The backward pass, by side: of the sizes that compile without spilling, the largest. At N=16384 they give 485 at
// D=256 and 437 at 192/128 (docs/experiments.md, "Hopper's backward pass"); of other sizes none has been measured.
constexpr BackwardConfig query_tiles[] = {
    {.D = 64, .Dv = 64, .warpgroups = 3, .block_columns = 96, .stages = 4, .vo_stages = 4, .drains = true},
    {.D = 128, .Dv = 128, .block_columns = 112, .stages = 2, .vo_stages = 2},
    {.D = 192, .Dv = 128, .block_columns = 96, .stages = 2, .vo_stages = 2, .drains = true},
    {.D = 192, .Dv = 192, .block_columns = 80, .stages = 2, .vo_stages = 2},
    {.D = 256, .Dv = 256, .block_columns = 64, .stages = 2, .vo_stages = 1},
};
constexpr BackwardConfig key_tiles[] = {
    {.D = 64, .Dv = 64, .block_columns = 96, .stages = 4, .vo_stages = 4},
    {.D = 128, .Dv = 128, .block_columns = 64, .stages = 4, .vo_stages = 4, .drains = true},
    {.D = 192, .Dv = 128, .block_columns = 64, .stages = 3, .vo_stages = 3, .paired = true},
    {.D = 192, .Dv = 192, .block_columns = 64, .stages = 3, .vo_stages = 3, .paired = true},
    {.D = 256, .Dv = 256, .block_columns = 64, .stages = 2, .vo_stages = 2, .paired = true},
};
// One of dK and dV where both would take a pair.
constexpr BackwardConfig one_gradient_tiles[] = {
    {.D = 192, .Dv = 192, .block_columns = 64, .stages = 2, .vo_stages = 2},
    {.D = 256, .Dv = 256, .block_columns = 48, .stages = 2, .vo_stages = 2},
};

// With options, which need registers.
constexpr BackwardConfig general_query_tiles[] = {
    {.D = 64, .Dv = 64, .block_columns = 64, .stages = 4, .vo_stages = 4, .general = true},
    {.D = 128, .Dv = 128, .block_columns = 64, .stages = 3, .vo_stages = 3, .general = true},
    {.D = 192, .Dv = 192, .block_columns = 32, .stages = 3, .vo_stages = 3, .general = true},
    {.D = 256, .Dv = 256, .block_columns = 32, .stages = 2, .vo_stages = 2, .general = true},
};
constexpr BackwardConfig general_key_tiles[] = {
    {.D = 64, .Dv = 64, .block_columns = 48, .stages = 4, .vo_stages = 4, .general = true},
    {.D = 128, .Dv = 128, .block_columns = 32, .stages = 4, .vo_stages = 4, .drains = true, .general = true},
    {.D = 192, .Dv = 192, .block_columns = 48, .stages = 3, .vo_stages = 3, .paired = true, .general = true},
    {.D = 256, .Dv = 256, .block_columns = 32, .stages = 3, .vo_stages = 3, .paired = true, .general = true},
};
constexpr BackwardConfig general_one_gradient_tiles[] = {
    {.D = 192, .Dv = 192, .block_columns = 32, .stages = 3, .vo_stages = 3, .general = true},
    {.D = 256, .Dv = 256, .block_columns = 32, .stages = 2, .vo_stages = 2, .general = true},
};

// How much the options of scores ask of registers: dropout the most.
int weight_of(const gpu::ScoreConfig& options) { return options.count() + options.dropout; }

}  // namespace

bool halves_S(const Problem& p) { return p.q_type == Type::f16 && p.D > 128; }

std::optional<Config> forward_tile(const Problem& p) {
  const bool halves = halves_S(p);
  const Config* row = fitting<Config>(p, halves ? std::span<const Config>(halved) : plain);
  if (!row) return {};
  Config c = *row;
  c.element = gpu::element_of(p.q_type), c.o = gpu::element_of(p.o_type);
  c.paged = p.pages.has_value();
  c.carried = p.carried();
  if (c.carried && p.state_out) c.o = c.element;  // there is none
  // Calls with O of one type or another, or with none, must agree about a row's bits.
  if (c.o == Element::f32 || c.carried) {
    c.stages_O = false;
    if (c.D == 256) c.p_buffers = 1;
  }

  c.options = gpu::score_config(p);
  c.general = c.options.any() || !(p.options.scale > 0);
  if (c.general) {
    // Options need registers: tiles are the smaller the more of them there are.
    const bool tiny = c.options.dropout && c.D > 128, small = weight_of(c.options) > 1 || halves;
    c.block_keys = tiny ? 16 : small ? 32 : 64, c.stages = tiny ? 5 : small ? 3 : 2;
    c.warpgroups = 2, c.q_stages = 1, c.p_buffers = 1;
    if (c.D == 256) c.stages_O = false;
  }
  return c;
}

std::optional<BackwardConfig> backward_tile(const Problem& p, Side side) {
  using Tiles = std::span<const BackwardConfig>;
  const gpu::ScoreConfig options = gpu::score_config(p);
  const bool general = options.any() || !(p.options.scale > 0);
  const auto find = [&](Tiles plain, Tiles with_options) { return fitting(p, general ? with_options : plain); };
  const BackwardConfig* row =
      side == Side::queries ? find(query_tiles, general_query_tiles) : find(key_tiles, general_key_tiles);
  if (row && row->paired && !(p.dk && p.dv)) row = find(one_gradient_tiles, general_one_gradient_tiles);
  if (!row) return {};
  BackwardConfig c = *row;
  c.options = options;
  const auto element = [](const std::optional<Type>& type) { return type ? gpu::element_of(*type) : Element::none; };
  c.side = side, c.element = gpu::element_of(p.q_type), c.halves_S = halves_S(p);
  c.dQK = element(side == Side::queries ? p.dq : p.dk);
  c.dV = element(side == Side::queries ? std::nullopt : p.dv);
  return c;
}

}  // namespace tessera::sm90
