// SPDX-License-Identifier: Apache-2.0
// Plans of the `decode` kernels: what they refuse, tiles, workspace, units and parameter blocks; see algorithms.hpp.
#include <algorithm>
#include <numeric>

#include "core/failure.hpp"
#include "core/limits.hpp"
#include "core/tensor.hpp"
#include "cuda/module.hpp"
#include "decode/algorithms.hpp"
#include "gpu/unit.hpp"

namespace tessera::decode {
namespace {

using gpu::Given;
using gpu::spelled;
using gpu::Step;
using gpu::Steps;

constexpr std::int64_t most_positions = std::int64_t{1} << 30;  // of keys: they are counted in 32 bits
constexpr std::int64_t most_groups = std::int64_t{1} << 26;     // of rows: each has a work item

constexpr ScheduleConfig schedule_config{};

std::string config_text(const Config& c) {
  return text("tessera::decode::Config config{.D = ", c.D, ", .Dv = ", c.Dv, ", .element = ", spelled(c.element),
              ", .q = ", spelled(c.q), ", .k = ", spelled(c.k), ", .v = ", spelled(c.v), ", .o = ", spelled(c.o),
              ", .rows = ", c.rows, ", .tile_keys = ", c.tile_keys, ", .parts = ", c.parts, ", .stages = ", c.stages,
              ", .levels = ", c.levels, ", .blocks_per_sm = ", c.blocks_per_sm, ", .warps = ", c.warps,
              ", .direct = ", spelled(c.direct), ", .cluster = ", c.cluster, ", .whole = ", spelled(c.whole),
              ", .paged = ", spelled(c.paged), ", .scaled = ", spelled(c.scaled), ", .k_groups = ", c.k_groups,
              ", .v_groups = ", c.v_groups, ", .qv = ", spelled(c.qv), ", .draft = ", spelled(c.draft),
              ", .halves_S = ", spelled(c.halves_S), ", .options = ", spelled(c.options), "}");
}

std::string schedule_unit_text() {
  return gpu::UnitText{
      .file = "decode/kernel/schedule.cuh",
      .function = "tessera::decode::schedule<config>",
      .parameters = "tessera::decode::Params",
      .config = text("tessera::decode::ScheduleConfig config{.threads = ", schedule_config.threads, "}"),
      .launch_bounds = "config.threads, 1"}
      .str();
}

bool has_eight_bits(Type type) { return type == Type::e4m3 || type == Type::i8; }

// Products are those of Q's type, or of f16, which holds every number of 8 bits.
Element product_type(const Problem& p) {
  return has_eight_bits(p.k_type) || has_eight_bits(p.v_type) ? Element::f16 : gpu::element_of(p.q_type);
}

std::string refused_types(const Problem& p) {
  const Element products = product_type(p);
  for (const auto& [name, type] : {std::pair{"k", p.k_type}, {"v", p.v_type}})
    if (!has_eight_bits(type) && gpu::element_of(type) != products)
      return text(name, " has type ", name_of(type),
                  "; beside these types of q, k and v this kernel takes e4m3, i8 and ",
                  products == Element::f16 ? "f16" : "bf16");
  return "";
}

// Tiles of so many rows. One long sequence among many short ones would give each of them as many as it has itself.
struct CountedGroups {
  std::int64_t count, block_queries = 0, block_tiles = 0;
};
CountedGroups groups_of(const Problem& p, std::int64_t rows) {
  const std::int64_t tiles = product({p.B, ceil_div(rows_of(p), rows)});
  if (!p.packed) return {tiles};
  const std::int64_t group = p.heads_per_kv(), common = std::gcd(rows, group);
  const std::int64_t queries = rows / common, of_block = group / common;
  const std::int64_t of_tokens = product({gpu::block_count(true, p.Nq, queries, p.B), of_block});
  return of_tokens < tiles ? CountedGroups{of_tokens, queries, of_block} : CountedGroups{tiles};
}

// Whatever the number of rows.
std::string refusal(const Problem& p, const cuda::Target& target) {
  if (p.pass != Pass::forward) return "pass is backward; this kernel is for the forward pass";
  if (p.q_type != Type::f16 && p.q_type != Type::bf16)
    return text("type is ", name_of(p.q_type), "; this kernel takes f16 and bf16");
  if (target.major < 8) return text("the GPU is ", target.architecture(), "; this kernel runs on sm_80 and later");
  if (const std::string reason = refused_types(p); !reason.empty()) return reason;
  if (p.alignment < 16)
    return text("q, k and v are aligned to ", p.alignment, " bytes; this kernel copies 16 at a time");
  if (p.bias || p.mask) return text("a ", p.bias ? "bias" : "mask", " is given; this kernel takes softcap and ALiBi");
  if (p.score_options().dropout) return text("dropout is ", p.options.dropout, "; this kernel has none");
  if (p.Nk > most_positions) return text("Nk is ", p.Nk, "; this kernel counts up to ", most_positions, " keys");
  if (product({p.Hk, groups_of(p, 8).count}) > most_groups)
    return text("B is ", p.B, ", Nq is ", p.longest_q(), " and Hk is ", p.Hk, "; this kernel counts up to ",
                most_groups, " groups of 8 rows");
  return "";
}

// Groups of rows of all KV heads: without a queue each has a cluster, or blocks that find each other.
std::int64_t group_count(const Problem& p, const Config& c) { return product({p.Hk, groups_of(p, c.rows).count}); }

std::int64_t leaf_count(const Problem& p) { return std::max<std::int64_t>(1, ceil_div(p.longest_k(), leaf_keys)); }

// Blocks of a cluster, as many as there are leaves and as run at the same time. A cluster's multiprocessors are
// neighbours, of which there are 14 to 18 in a group that no cluster leaves: larger ones leave some over.
int cluster_of(const Problem& p, const cuda::Target& target, const Config& c) {
  // Eight are portable. Twice as many need no more neighbours than that where a multiprocessor has room for two.
  const int most = c.blocks_per_sm > 1 ? 2 * cuda::portable_cluster : cuda::portable_cluster;
  const std::int64_t clusters = group_count(p, c), room = std::int64_t{target.multiprocessors} * c.blocks_per_sm;
  const auto fits = [&](int blocks) {
    return blocks <= 2 ? product({clusters, blocks}) <= room : product({4, clusters, blocks}) <= 3 * room;
  };
  int blocks = 1;
  while (blocks < most && blocks < leaf_count(p) && fits(2 * blocks)) blocks *= 2;
  return blocks;
}

// Without a queue no block makes up for another that has more to do. Where every block looks at all groups, a warp
// does.
std::string direct_refusal(const Problem& p, const cuda::Target& target, const Config& c) {
  constexpr std::int64_t uneven_leaves = 8;  // of a block, where others may have none
  const CountedGroups groups = groups_of(p, c.rows);
  if (groups.block_queries > 0) return "tiles of rows are numbered by packed tokens; without a queue, by sequences";
  const std::string those =
      text("B is ", p.B, ", Nq is ", p.longest_q(), " and Hk is ", p.Hk, ": ", groups.count, " tiles of rows");
  const std::int64_t most = c.cluster > 0 && c.parts == 2 ? target.multiprocessors : target.multiprocessors / 2;
  if (group_count(p, c) > most)
    return text(those, ", times Hk ", group_count(p, c), "; without a queue this kernel takes at most ", most);
  if (c.cluster == 0 && groups.count > most_direct_groups)
    return text(those, "; without a queue or clusters this kernel takes at most ", most_direct_groups);
  const bool uneven = p.B > 1 && (p.packed || p.seqused_k || p.pages);
  if (c.cluster > 0 && uneven && leaf_count(p) > uneven_leaves * c.cluster)
    return text(those, " in clusters of ", c.cluster, ", of which one may have ", p.longest_k(),
                " keys and the others none; without a queue this kernel takes at most ", uneven_leaves * leaf_keys,
                " for each block then");
  return "";
}

// As many rows as the problem has, in 8, 16, 32 or 64; fewer if shared memory demands it, or registers: beyond 128 dims
// 64 rows spill, with scales, qv, or a tree over 8 bits beyond 64; beyond 256 more than 16 do. Where values have a
// maximum for each 128 dims, half as many do (by 8 to 96 bytes, of 255 registers).
int rows_wanted(const Problem& p) {
  const bool drafts = (p.tree_words > 0 || p.positions) && (has_eight_bits(p.k_type) || has_eight_bits(p.v_type));
  const std::int64_t dims = std::max(p.D, p.Dv), narrow = p.k_scale > 0 || p.v_scale > 0 || p.qv || drafts ? 64 : 128;
  int most = dims > 256 ? most_rows / 4 : dims > narrow ? most_rows / 2 : most_rows;
  if (p.v_scale == 4 && p.Dv > group_dims) most /= 2;
  int rows = 8;
  while (rows < rows_of(p) && rows < most) rows *= 2;
  return rows;
}

// Two blocks on a multiprocessor, with more stages than two if they fit, else one; the rest is the stack's. Of 8 rows
// four have registers enough, without qv: they hide the latency of products, where small tiles leave room for three
// stages, or K and V of 8 bits let memory wait for products. Whether a tile fits must not decide about its keys: rows
// would have other bits in other company.
bool fit(Config& c, int shared_bytes) {
  constexpr int reserved = 1024;  // of every block
  for (const int blocks : {4, 2, 1}) {
    const int room = (shared_bytes + reserved) / blocks - reserved;
    // Registers do not suffice for keys and values of two types, nor for ALiBi beside 8 bits or scales.
    const bool bytes = eight_bits(c.k) && eight_bits(c.v);
    const bool crowded = (bytes && c.k != c.v) || ((bytes || c.scaled) && c.options.alibi);
    if (blocks == 4 && (c.rows > 8 || c.qv || (c.direct && c.cluster == 0) || c.warps == 8 || crowded)) continue;
    if (blocks == 2 && c.warps == 8 && c.rows > 8) continue;  // nor here
    for (const int stages : {4, 3, 2}) {
      if (blocks == 4 && stages == 2 && !bytes) continue;
      c.blocks_per_sm = blocks, c.stages = stages, c.levels = 1;
      // The largest tiles leave no room for a state: the whole stack lies in the workspace then.
      if (layout_of(c).bytes > room && blocks == 1 && stages == 2 && (c.rows == 8 || c.Dv > 256)) c.levels = 0;
      if (layout_of(c).bytes > room) continue;
      for (Config more = c; more.levels < 6 && layout_of(more).bytes <= room; ++more.levels) c = more;
      return true;
    }
  }
  return false;
}

// Two tiles at once, by twice as many warps: half as many barriers, for a multiprocessor's only block.
bool widen(Config& c, int shared_bytes) {
  if (c.tile_keys != 64 || c.D > 128 || c.Dv != 128 || c.qv || (c.scaled && c.draft)) return false;
  c.warps = 8, c.tile_keys = 128, c.parts = 2;
  return fit(c, shared_bytes);
}

// With a queue: blocks hide less of each other's beginnings and ends than small ones do, so only for long sequences.
std::optional<Config> tile_with_queue(Config c, const Problem& p, int shared_bytes) {
  constexpr std::int64_t long_sequence = 16384;
  if (Config wide = c; p.longest_k() >= long_sequence && !eight_bits(c.k) && !eight_bits(c.v))
    if (widen(wide, shared_bytes)) return wide;
  if (!fit(c, shared_bytes)) return {};
  return c;
}

// Without: a cluster, if a block of it has one leaf at most, or if wide blocks are a multiprocessor each of nearly all
// and finding pages does not hold them up. Else, and where GPUs have no clusters, blocks that find each other.
std::optional<Config> tile_without_queue(Config c, const Problem& p, const cuda::Target& target) {
  constexpr std::int64_t small_page = 64;
  const bool clusters = target.major == 9 || target.major == 10;
  const auto clustered = [&](Config found) -> std::optional<Config> {
    found.cluster = 2;  // its room counts
    if (!clusters || !fit(found, target.shared_bytes)) return {};
    found.cluster = cluster_of(p, target, found);
    const bool few_keys = found.cluster >= leaf_count(p), bytes = eight_bits(c.k) || eight_bits(c.v);
    const bool fills = found.parts == 2 && found.cluster <= 2 && !bytes && (!c.paged || p.pages->size >= small_page) &&
                       product({4, group_count(p, c), found.cluster}) >= 3 * std::int64_t{target.multiprocessors};
    if (!few_keys && !fills) return {};
    return found;
  };
  if (Config wide = c; widen(wide, target.shared_bytes)) {
    if (const auto found = clustered(wide)) return found;
    return wide;
  }
  // Few blocks have a multiprocessor each: more warps hide the latency that other blocks would.
  c.warps = c.rows == 8 && c.Dv == 128 && !c.qv && !(c.scaled && c.draft) ? 8 : 4;
  if (const auto found = clustered(c)) return found;
  if (!fit(c, target.shared_bytes)) return {};
  return c;
}

std::string no_tile(const cuda::Target& target) {
  return text("no tile fits the ", target.shared_bytes, " bytes of shared memory");
}

Draft draft_of(const Problem& p, const Inputs& in) {
  Draft out{};
  const Tensor &tree = in.tree_mask, &positions = in.positions;
  if (p.tree_words > 0) {
    out.tree = static_cast<const Int32*>(tree.data);
    out.tree_batch = p.packed ? 0 : stride(tree, 0);
    out.tree_row = stride(tree, tree.ndim - 2), out.tree_word = stride(tree, tree.ndim - 1);
    out.tree_bits = static_cast<Int32>(std::min<std::int64_t>(32 * p.tree_words, most_positions));
  }
  if (p.positions) {
    out.positions = static_cast<const Int32*>(positions.data);
    out.position_batch = p.packed ? 0 : stride(positions, 0);
    out.position_row = stride(positions, positions.ndim - 1);
  }
  return out;
}

Int64 group_stride(const Tensor& scale) { return scale.ndim == 4 ? stride(scale, 3) : 0; }

// `taken`: the problem as if no sequence had more queries than are taken here.
Params params_of(const Problem& p, const Problem& taken, const cuda::Target& target, const Config& c,
                 std::int64_t own_at, const Given& given) {
  const Inputs& in = given.call.inputs;
  const CountedGroups groups = groups_of(taken, c.rows);
  Params out{.call = given.forward(),
             .qv = p.qv ? gpu::token_ref(in.qv, p) : gpu::TokenRef{},
             .pages = gpu::page_tables(p, given.call),
             .k_scale = gpu::scale_ref(in.k_scale),
             .v_scale = gpu::scale_ref(in.v_scale),
             .k_scale_group = group_stride(in.k_scale),
             .v_scale_group = group_stride(in.v_scale),
             .draft = draft_of(p, in),
             .memory = carve(taken, target, c, given.own + own_at).memory,
             .most = {.queries = p.longest_q(), .keys = p.longest_k()},
             .levels = levels_above(ceil_div(p.longest_k(), leaf_keys)),
             .D = static_cast<Int32>(p.D),
             .Dv = static_cast<Int32>(p.Dv),
             .group = static_cast<Int32>(p.heads_per_kv()),
             .rows = c.rows,
             .tiles = static_cast<Int32>(ceil_div(rows_of(taken), c.rows)),
             .groups = {static_cast<Int32>(groups.count), static_cast<Int32>(groups.block_queries),
                        static_cast<Int32>(groups.block_tiles)},
             .taken_queries = static_cast<Int32>(taken.longest_q()),
             .workers = target.multiprocessors * c.blocks_per_sm,
             .plain = false};
  if (p.pages) out.call.x.k = gpu::page_ref(in.k), out.call.x.v = gpu::page_ref(in.v);
  const gpu::Question& x = out.call.x;
  const bool last_row = p.longest_q() <= 1 && x.alignment == 0 && x.row0 == x.col0;  // below it there is no diagonal
  out.plain = x.window_left < 0 && x.window_right < 0 && (!x.causal || last_row) && !x.slopes && !out.draft.tree &&
              !out.draft.positions;
  return out;
}

void add_launches(Steps& steps, const Problem& p, const Problem& taken, const cuda::Target& target, const Config& c) {
  const Carved carved = carve(taken, target, c, nullptr);
  const char* way = c.cluster > 0 ? ", no schedule" : c.direct ? ", no queue" : "";
  const std::int64_t own_at = rounded_up(steps.own_bytes, 16);  // behind what is other launches'
  steps.own_bytes = sum({own_at, carved.bytes});
  const auto params = [=](const Given& given) { return params_of(p, taken, target, c, own_at, given); };
  Step schedule{.name = "decode_schedule",
                .unit = schedule_unit_text(),
                .blocks = 1,
                .threads = schedule_config.threads,
                .shared_bytes = schedule_bytes};
  schedule.gives<Params>(params);
  Step attend{.name = "decode_attend",
              .unit = attend_unit_text(c),
              .blocks = carved.blocks,
              .threads = c.threads(),
              .shared_bytes = layout_of(c).bytes,
              .programmatic = target.major >= 9 && c.cluster == 0,
              .cluster = std::max(c.cluster, 1),
              .tiles = text("tiles of ", c.rows, " rows x ", c.tile_keys, " keys, ", c.warps, " warps", way)};
  attend.gives<Params>(params);
  if (c.cluster == 0) steps.add(std::move(schedule));
  steps.add(std::move(attend));
}

Steps steps_of_rows(const Problem& p, const cuda::Target& target, bool direct = false) {
  if (std::string reason = refusal(p, target); !reason.empty()) return Steps::refused(std::move(reason));
  const std::optional<Config> c = tile_of(p, target, direct);
  if (!c) return Steps::refused(no_tile(target));
  if (std::string reason = direct ? direct_refusal(p, target, *c) : ""; !reason.empty())
    return Steps::refused(std::move(reason));
  Steps steps(p);
  // What other GPUs' tensor cores lose has not been measured.
  if (target.major == 9) steps.score_scale = gpu::corrected_scale(p, c->halves_S || c->k_groups > 1);
  if (p.has_queries()) add_launches(steps, p, p, target, *c);
  return steps;
}

template <bool direct>
Steps few_steps(const Problem& p, const cuda::Target& target) {
  if (p.pass == Pass::forward && rows_of(p) > most_rows)
    return Steps::refused(text("Nq is ", p.longest_q(), " and ", p.heads_per_kv(),
                               " heads share a KV head; this kernel takes at most ", most_rows,
                               " rows of queries for each"));
  return steps_of_rows(p, target, direct);
}

Steps many_steps(const Problem& p, const cuda::Target& target) {
  if (p.pass == Pass::forward && rows_of(p) <= most_rows)
    return Steps::refused(text("no sequence has more than ", most_rows, " rows of queries for each KV head"));
  return steps_of_rows(p, target);
}

}  // namespace

std::int64_t rows_of(const Problem& p) { return product({p.longest_q(), p.heads_per_kv()}); }

void add_few_rows(Steps& steps, const Problem& p, const cuda::Target& target) {
  Problem few = p;
  const std::int64_t most = most_rows / p.heads_per_kv();
  if (p.packed)
    few.options.max_seqlen_q = std::min(p.longest_q(), most);
  else
    few.Nq = std::min(p.Nq, most);
  if (!steps.reason.empty() || rows_of(few) == 0 || !p.has_queries()) return;
  std::string reason = refusal(few, target);
  const std::optional<Config> c = reason.empty() ? tile_of(few, target) : std::nullopt;
  if (reason.empty() && !c) reason = no_tile(target);
  if (reason.empty())
    add_launches(steps, p, few, target, *c);
  else
    steps = Steps::refused(text("decode, for sequences of at most ", most_rows, " rows: ", reason));
}

std::optional<Config> tile_of(const Problem& p, const cuda::Target& target, bool direct) {
  const auto padded = [](std::int64_t dims) { return static_cast<int>(round_up(dims, gpu::panel_columns)); };
  constexpr int large = 160 << 10;  // of sm_80; sm_86, sm_89 and sm_120 have 99 KB
  Config c{.D = padded(p.D), .Dv = padded(p.Dv), .element = product_type(p), .direct = direct};
  c.q = gpu::element_of(p.q_type), c.k = gpu::element_of(p.k_type), c.v = gpu::element_of(p.v_type);
  c.o = gpu::element_of(p.o_type);
  const auto key_units = units_of(c.D, c.k) + units_of(c.Dv, c.v);
  c.tile_keys = key_units > (target.shared_bytes < large ? 256 : most_value_dims + 64) ? 32 : 64;
  // Rows of 8 bits may fill half of a panel.
  const auto fills = [](int dims, Element type) { return !eight_bits(type) || units_of(dims, type) * 2 == dims; };
  c.whole = c.D == p.D && c.Dv == p.Dv && fills(c.D, c.k) && fills(c.Dv, c.v);
  c.paged = p.pages.has_value();
  c.scaled = p.k_scale > 0 || p.v_scale > 0;
  const auto groups = [](int scale, std::int64_t dims) { return scale == 4 ? int(ceil_div(dims, group_dims)) : 1; };
  c.k_groups = groups(p.k_scale, p.D), c.v_groups = groups(p.v_scale, p.Dv);
  c.qv = p.qv;
  c.draft = p.tree_words > 0 || p.positions;
  c.halves_S = p.q_type == Type::f16 && (p.D > 128 || (p.qv && p.Dv > 128));
  c.options = gpu::score_config(p);
  // Without a queue, registers do not hold 64 rows.
  for (c.rows = std::min(rows_wanted(p), direct ? 32 : most_rows); c.rows >= 8; c.rows /= 2)
    if (auto found = direct ? tile_without_queue(c, p, target) : tile_with_queue(c, p, target.shared_bytes))
      return found;
  return {};
}

Carved carve(const Problem& p, const cuda::Target& target, const Config& c, std::byte* base) {
  constexpr std::int64_t most_state_bytes = 9 << 20;  // of partial results, about
  const std::int64_t leaves = leaf_count(p);
  const std::int64_t groups = product({p.Hk, groups_of(p, c.rows).count});
  const std::int64_t state = state_floats(c.rows, static_cast<int>(c.Dv)) * std::int64_t{4};
  // Enough for every multiprocessor to have several, and no more than there are leaves.
  const std::int64_t slots =
      leaves == 1 || c.cluster > 0
          ? 0
          : std::min(product({groups, leaves}),
                     std::max<std::int64_t>(most_state_bytes / state, std::int64_t{4} * target.multiprocessors));
  const std::int64_t blocks = c.cluster > 0
                                  ? groups * c.cluster
                                  : std::min<std::int64_t>(target.multiprocessors * c.blocks_per_sm, groups + slots);
  // Two neighbours may have no node above them but the root.
  const auto climbs = static_cast<Int32>(ceil_div(levels_above(leaves), family_levels));
  const int stack_levels = std::max(0, levels_above(leaves) - c.levels);

  std::int64_t used = 0;
  const auto take = [&](std::int64_t bytes) {
    std::byte* at = base ? base + used : nullptr;
    used = sum({used, rounded_up(bytes, 16)});
    return at;
  };
  Carved out{};
  if (!c.direct) {
    out.memory.queue = reinterpret_cast<Queue*>(take(sizeof(Queue)));
    out.memory.groups = reinterpret_cast<Group*>(take(product({groups_of(p, c.rows).count, sizeof(Group)})));
    out.memory.items = reinterpret_cast<Item*>(take(product({groups + slots, sizeof(Item)})));
  }
  out.memory.counts = reinterpret_cast<UInt32*>(take(product({climbs, slots, sizeof(UInt32)})));
  out.memory.stacks = reinterpret_cast<float*>(take(product({blocks, stack_levels, state})));
  out.memory.states = reinterpret_cast<float*>(take(product({slots, state})));
  out.memory.most_items = static_cast<Int32>(groups + slots), out.memory.most_slots = static_cast<Int32>(slots);
  out.memory.climbs = climbs, out.memory.stack_levels = stack_levels;
  out.blocks = blocks, out.bytes = used;
  return out;
}

std::string attend_unit_text(const Config& c) {
  return gpu::UnitText{.file = "decode/kernel/attend.cuh",
                       .function = "tessera::decode::attend<config>",
                       .parameters = "tessera::decode::Params",
                       .config = config_text(c),
                       .launch_bounds = "config.threads(), config.blocks_per_sm"}
      .str();
}

namespace {
constexpr const char* by_name =
    "this kernel is not the fastest for few keys yet; a call without a cache gets it if it asks for it by name";
}  // namespace

std::vector<gpu::Algorithm> algorithms() {
  return {{.name = "decode_direct",
           .family = "decode",
           .plan = few_steps<true>,
           .by_name = by_name,
           .caches = gpu::Caches::all},
          {.name = "decode_queue",
           .family = "decode",
           .plan = few_steps<false>,
           .by_name = by_name,
           .caches = gpu::Caches::all}};
}

std::vector<gpu::Algorithm> fallbacks() {
  return {
      {.name = "decode_many", .family = "decode", .plan = many_steps, .by_name = by_name, .caches = gpu::Caches::all}};
}

}  // namespace tessera::decode
