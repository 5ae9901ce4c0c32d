// SPDX-License-Identifier: Apache-2.0
// Draws random configurations in which every pair of options can occur, and counts the pairs that do (pairwise
// coverage). Part of tessera_cases; see random.hpp. Implements docs/numerics.md, "Random configurations".
#include "cases/random.hpp"

#include <algorithm>
#include <sstream>
#include <utility>

#include "cases/generator.hpp"
#include "cases/tiles.hpp"

namespace tessera::cases {

namespace {

// How large cases are: tiles that lengths lie around, and pairs of elements that are multiplied for S; in small cases
// tiles of 32 x 32 pairs and 64 dims, begun ones included.
struct Size {
  std::int64_t tile_q, tile_k;
  double usual_cost, rare_cost;
  bool in_tiles = false;
};
constexpr Size usual{tile_q, tile_k, 1.2e7, 6e7}, small{32, 32, 10, 50, true};
constexpr std::size_t fewest_options = 3;

template <class T, std::size_t N>
T pick(Generator& g, const T (&from)[N]) {
  return from[static_cast<std::size_t>(g.between(0, N - 1))];
}

// Around one and two tiles, tiny, or anything.
std::int64_t length(Generator& g, std::int64_t tile) {
  switch (g.between(0, 5)) {
    case 0:
      return g.between(1, 3);
    case 1:
      return g.between(4, 40);
    case 2:
      return tile + g.between(-1, 1);
    case 3:
      return 2 * tile + g.between(1, 40);
    default:
      return g.between(1, 3 * tile / 2);
  }
}

std::vector<std::int32_t> lengths(Generator& g, std::int64_t count, std::int64_t tile) {
  std::vector<std::int32_t> all(static_cast<std::size_t>(count));
  for (auto& n : all) n = g.chance(0.15) ? 0 : static_cast<std::int32_t>(length(g, tile));
  return all;
}

std::vector<std::int32_t> used(Generator& g, const Case& c, const std::vector<std::int32_t>& packed, std::int64_t N) {
  std::vector<std::int32_t> all(static_cast<std::size_t>(c.batches()));
  for (std::size_t b = 0; b < all.size(); ++b) {
    const std::int64_t most = c.packed() ? packed[b] : N;
    all[b] = static_cast<std::int32_t>(g.chance(0.3) ? most : g.between(0, most));
  }
  return all;
}

double cost(const Case& c, const Size& size) {
  const std::int64_t tile = size.in_tiles ? 32 : 1, chunk = size.in_tiles ? 64 : 1;
  const auto in = [](std::int64_t unit, std::int64_t n) { return static_cast<double>((n + unit - 1) / unit); };
  double pairs = c.packed() ? 0 : static_cast<double>(c.B) * in(tile, c.Nq) * in(tile, c.Nk);
  for (std::size_t b = 0; b < c.packed_q.size(); ++b) pairs += in(tile, c.packed_q[b]) * in(tile, c.packed_k[b]);
  return pairs * static_cast<double>(c.Hq) * (in(chunk, c.D) + in(chunk, c.dim_v())) / 2;
}

void draw_shapes(Generator& g, Case& c, const Size& size) {
  constexpr std::int64_t dims[] = {1, 3, 8, 16, 24, 32, 40, 59, 64, 64, 72, 80, 96, 111, 128, 160, 192, 256};
  constexpr std::int64_t ratios[] = {1, 1, 2, 3, 4, 5, 7};
  const double limit = g.chance(0.05) ? size.rare_cost : size.usual_cost;
  const bool both_long = g.chance(0.1);  // beyond two tiles of queries and of keys
  do {
    c.Hk = g.between(1, 3), c.Hq = c.Hk * pick(g, ratios);
    c.D = pick(g, dims), c.Dv = g.chance(0.35) ? pick(g, dims) : 0;
    c.B = g.between(1, 4);
    c.packed_q.clear(), c.packed_k.clear();
    if (both_long) {
      c.B = 1, c.Nq = 2 * size.tile_q + g.between(1, 40), c.Nk = 2 * size.tile_k + g.between(1, 40);
    } else if (g.chance(0.35)) {
      c.packed_q = lengths(g, c.B + 1, size.tile_q), c.packed_k = lengths(g, c.B + 1, size.tile_k);
      c.front_q = g.chance(0.4) ? g.between(1, 300) : 0, c.front_k = g.chance(0.4) ? g.between(1, 300) : 0;
      c.tail_q = g.chance(0.4) ? g.between(1, 70) : 0, c.tail_k = g.chance(0.4) ? g.between(1, 200) : 0;
    } else {
      c.Nq = length(g, size.tile_q), c.Nk = length(g, size.tile_k);
    }
    if (!c.packed()) c.front_q = c.front_k = c.tail_q = c.tail_k = 0;
  } while (cost(c, size) > limit);
  if (g.chance(0.3)) c.used_q = used(g, c, c.packed_q, c.Nq);
  if (g.chance(0.3)) c.used_k = used(g, c, c.packed_k, c.Nk);
}

void draw_visibility(Generator& g, Case& c, const Size& size) {
  const std::int64_t Nq = c.packed() ? size.tile_q : c.Nq, Nk = c.packed() ? size.tile_k : c.Nk;
  Options& o = c.options;
  o.causal = g.chance(0.4);
  if (g.chance(0.35)) {
    o.window_left = g.chance(0.25) ? -1 : g.between(0, Nk + 10);
    o.window_right = g.chance(0.25) && o.window_left >= 0 ? -1 : g.between(0, Nk);
  }
  if (g.chance(0.45)) o.alignment = g.chance(0.5) ? Alignment::top_left : Alignment::offset;
  if (o.alignment == Alignment::offset) o.diagonal_offset = g.between(-Nq / 2, Nk);
  if (g.chance(0.3)) {
    o.row0 = g.between(0, 5000), o.col0 = std::max<std::int64_t>(0, o.row0 + g.between(-Nk / 2, Nq));
    o.head0 = g.between(0, 9), o.batch0 = g.between(0, 9);
  }
  if (g.chance(0.35)) {
    c.mask = true;
    c.mask_dims = {.b = g.chance(0.5), .h = g.chance(0.5), .i = g.chance(0.6), .j = g.chance(0.7)};
    c.mask_density = g.chance(0.3) ? 0.05 : 0.7;
  }
}

void draw_scores(Generator& g, Case& c) {
  constexpr double softcaps[] = {0.7, 2, 5, 30}, scales[] = {0, -0.15, 0.03, 0.5}, rates[] = {0.1, 0.25, 0.5, 0.9};
  if (g.chance(0.3)) c.options.softcap = pick(g, softcaps);
  if (g.chance(0.3)) c.options.scale = pick(g, scales);
  if (g.chance(0.35)) c.slopes = g.chance(0.5) ? Slopes::per_head : Slopes::per_batch_head;
  if (g.chance(0.4)) {
    c.bias = true;
    c.bias_dims = {.b = g.chance(0.5), .h = g.chance(0.5), .i = g.chance(0.6), .j = g.chance(0.7)};
    c.bias_f32 = g.chance(0.5);
    c.masked_bias = g.chance(0.3) ? 0.3 : 0;
  }
  if (g.chance(0.35)) {
    c.options.dropout = pick(g, rates);
    c.options.seed = g.next() >> 12, c.options.seed_offset = g.next() >> 12;  // exact in a double, which has 53 bits
    c.rng = g.chance(0.5);
  }
  if (g.chance(0.35)) c.sinks = g.chance(0.7) ? Sinks::finite : Sinks::some_infinite;
}

void draw_outputs(Generator& g, Case& c) {
  c.dlse = g.chance(0.35);
  c.no_lse = g.chance(0.25);
  c.options.accumulate = g.chance(0.25);
  if (c.type != Type::f32 && g.chance(0.4)) {
    c.f32_o = g.chance(0.6), c.f32_do = g.chance(0.5);
    c.f32_grads = g.chance(0.6) || !c.f32_o;
  }
  if (c.options.accumulate) c.f32_grads = true;
  if (g.chance(0.35)) {
    const auto which = g.between(1, 30);  // never all, never none
    c.grads = {.dq = (which & 1) != 0,
               .dk = (which & 2) != 0,
               .dv = (which & 4) != 0,
               .dbias = (which & 8) != 0,
               .dsinks = (which & 16) != 0};
    const bool any_score_gradient = (c.bias && c.grads.dbias) || (c.sinks != Sinks::none && c.grads.dsinks);
    if ((which & 7) == 0 && !any_score_gradient) c.grads.dk = true;
  }
  if (c.packed() && g.chance(0.5)) {
    c.options.max_seqlen_q = *std::max_element(c.packed_q.begin(), c.packed_q.end()) + g.between(0, 9);
    c.options.max_seqlen_k = *std::max_element(c.packed_k.begin(), c.packed_k.end()) + g.between(0, 300);
  }
}

// Few cases go to the end of what is legal; the others keep the numbers that their seed gave them.
void draw_limits(Generator& g, Case& c) {
  constexpr std::int64_t far = (std::int64_t{1} << 48) - 20000, tokens[] = {1 << 20, 1 << 29, std::int64_t{1} << 34};
  const auto without_lengths = [&] { c.packed_q.clear(), c.packed_k.clear(), c.used_q.clear(), c.used_k.clear(); };
  switch (g.between(0, 39)) {
    case 0:
    case 1:
      c.endless_k = pick(g, tokens);
      if (!c.packed() && c.used_k.empty()) c.used_k = used(g, c, c.packed_k, c.Nk);
      c.grads.dk = c.grads.dv = c.grads.dbias = false, c.grads.dq = true;
      break;
    case 2:
    case 3:  // together, so that the diagonal stays where it is
      c.options.row0 += far, c.options.col0 += far, c.options.head0 -= far, c.options.batch0 += far;
      break;
    case 4:
      without_lengths();
      c.front_q = c.front_k = c.tail_q = c.tail_k = 0;
      (g.chance(0.5) ? c.Nq : c.Nk) = 0;
      if (g.chance(0.3)) c.B = g.chance(0.5) ? 0 : 3000, c.Nq = c.Nk = 0;
      break;
    case 5:
      c.Hq = 0;
      if (g.chance(0.5)) c.Hk = 0;
      break;
    default:
      break;
  }
}

Case draw(std::uint64_t seed, std::uint64_t attempt, const Size& size) {
  constexpr Type types[] = {Type::f32, Type::f16, Type::bf16};
  constexpr Style all_styles[] = {Style::contiguous, Style::gaps,  Style::heads_first,
                                  Style::shifted,    Style::mixed, Style::broadcast};
  constexpr Distribution distributions[] = {Distribution::normal, Distribution::normal,    Distribution::normal,
                                            Distribution::small,  Distribution::outlier,   Distribution::cold,
                                            Distribution::huge,   Distribution::structured};
  Generator g(seed, 1000 + attempt);
  Case c;
  c.name = random_name(seed), c.seed = seed;
  c.type = pick(g, types), c.style = pick(g, all_styles), c.distribution = pick(g, distributions);
  c.caller_workspace = g.chance(0.5);
  draw_shapes(g, c, size);
  draw_visibility(g, c, size);
  draw_scores(g, c);
  draw_outputs(g, c);
  draw_limits(g, c);
  return c;
}

std::size_t position(const std::string& option) {
  const auto& names = option_names();
  return static_cast<std::size_t>(std::find(names.begin(), names.end(), option) - names.begin());
}

}  // namespace

std::string random_name(std::uint64_t seed) { return "random_" + std::to_string(seed); }

static Case random_case(std::uint64_t seed, const Size& size) {
  for (std::uint64_t attempt = 0;; ++attempt) {
    Case c = draw(seed, attempt, size);
    if (active_options(c).size() >= fewest_options) return c;
  }
}

Case random_case(std::uint64_t seed) { return random_case(seed, usual); }

std::string random_small_name(std::uint64_t seed) { return "random_small_" + std::to_string(seed); }

Case random_small_case(std::uint64_t seed) {
  Case c = random_case(seed, small);
  c.name = random_small_name(seed);
  return c;
}

std::vector<Case> random_small_cases(std::uint64_t seed, std::size_t count) {
  std::vector<Case> all;
  for (std::size_t n = 0; n < count; ++n) all.push_back(random_small_case(seed + n));
  return all;
}

std::vector<Case> random_cases(std::uint64_t seed, std::size_t count) {
  std::vector<Case> all;
  for (std::size_t n = 0; n < count; ++n) all.push_back(random_case(seed + n));
  return all;
}

static Cached draw_cached(Generator& g) {
  constexpr Type types[] = {Type::e4m3, Type::i8, Type::e4m3, Type::i8, Type::f32, Type::f16, Type::bf16};
  constexpr Scales scales[] = {Scales::one,     Scales::per_head, Scales::per_sequence,
                               Scales::per_key, Scales::per_key,  Scales::per_group};
  Cached cached;
  if (g.chance(0.85)) cached.type = pick(g, types);
  if (cached.type == Type::i8 || g.chance(0.7)) cached.scales = pick(g, scales);
  return cached;
}

std::string random_cache_name(std::uint64_t seed) { return "random_cache_" + std::to_string(seed); }

Case random_cache_case(std::uint64_t seed) {
  Case c = random_case(seed);
  Generator g(seed, 2000);
  c.name = random_cache_name(seed), c.backward = false, c.options.accumulate = false;
  c.cached_k = draw_cached(g), c.cached_v = draw_cached(g);
  if (c.cached_k.plain() && c.cached_v.plain()) c.cached_v = {Type::e4m3, Scales::per_key};
  c.endless_k = 0, c.qv = g.chance(0.3);
  if (g.chance(0.35)) c.tree = static_cast<Tree>(g.between(1, 4));
  c.positions = g.chance(0.25);
  if (!c.packed() && g.chance(0.6)) c.Nq = std::min<std::int64_t>(c.Nq, g.between(1, 8)), c.used_q.clear();
  return c;
}

std::vector<Case> random_cache_cases(std::uint64_t seed, std::size_t count) {
  std::vector<Case> all;
  for (std::size_t n = 0; n < count; ++n) all.push_back(random_cache_case(seed + n));
  return all;
}

const std::vector<std::string>& option_names() {
  static const std::vector<std::string> names = {
      "causal",  "window", "top_left", "offset", "positions", "mask",    "softcap", "scale",       "alibi",
      "bias",    "dbias",  "dropout",  "rng",    "sinks",     "dlse",    "no_lse",  "f32_outputs", "accumulate",
      "partial", "gqa",    "d_not_dv", "packed", "front",     "seqused", "strided", "f16",         "bf16"};
  return names;
}

std::vector<std::string> active_options(const Case& c) {
  const Options& o = c.options;
  const std::pair<const char*, bool> all[] = {{"causal", o.causal},
                                              {"window", o.window_left >= 0 || o.window_right >= 0},
                                              {"top_left", o.alignment == Alignment::top_left},
                                              {"offset", o.alignment == Alignment::offset},
                                              {"positions", o.row0 || o.col0 || o.head0 || o.batch0},
                                              {"mask", c.mask},
                                              {"softcap", o.softcap > 0},
                                              {"scale", o.scale != default_scale},
                                              {"alibi", c.slopes != Slopes::none},
                                              {"bias", c.bias},
                                              {"dbias", c.bias && c.backward && c.grads.dbias},
                                              {"dropout", o.dropout > 0},
                                              {"rng", c.rng},
                                              {"sinks", c.sinks != Sinks::none},
                                              {"dlse", c.backward && c.dlse},
                                              {"no_lse", c.no_lse},
                                              {"f32_outputs", c.type != Type::f32 && (c.f32_o || c.f32_grads)},
                                              {"accumulate", o.accumulate},
                                              {"partial", c.backward && !c.grads.all()},
                                              {"gqa", c.Hq != c.Hk},
                                              {"d_not_dv", c.dim_v() != c.D},
                                              {"packed", c.packed()},
                                              {"front", c.front_q || c.front_k},
                                              {"seqused", !c.used_q.empty() || !c.used_k.empty()},
                                              {"strided", c.style != Style::contiguous},
                                              {"f16", c.type == Type::f16},
                                              {"bf16", c.type == Type::bf16}};
  std::vector<std::string> active;
  for (const auto& [name, on] : all)
    if (on) active.push_back(name);
  return active;
}

std::string infeasible(const std::string& a, const std::string& b) {
  const auto are = [&](const char* x, const char* y) { return (a == x && b == y) || (a == y && b == x); };
  if (are("f16", "bf16")) return "a call has one type";
  if (are("top_left", "offset")) return "a call has one alignment";
  return {};
}

PairCounts count_pairs(const std::vector<Case>& cases) {
  const std::size_t n = option_names().size();
  PairCounts pairs{.count = std::vector<std::vector<int>>(n, std::vector<int>(n, 0))};
  for (const Case& c : cases) {
    const auto active = active_options(c);
    for (std::size_t a = 0; a < active.size(); ++a)
      for (std::size_t b = a; b < active.size(); ++b) ++pairs.count[position(active[a])][position(active[b])];
  }
  return pairs;
}

std::vector<std::string> PairCounts::missing() const {
  const auto& names = option_names();
  std::vector<std::string> never;
  for (std::size_t a = 0; a < names.size(); ++a)
    for (std::size_t b = a + 1; b < names.size(); ++b)
      if (count[a][b] == 0 && infeasible(names[a], names[b]).empty()) never.push_back(names[a] + " + " + names[b]);
  return never;
}

std::string to_text(const PairCounts& pairs) {
  const auto& names = option_names();
  std::ostringstream out;
  out << "pairs of options (diagonal: the option itself; '-': they cannot meet)\n";
  for (std::size_t a = 0; a < names.size(); ++a) {
    out << names[a] << std::string(12 - names[a].size(), ' ');
    for (std::size_t b = 0; b <= a; ++b) {
      const bool never = a != b && !infeasible(names[b], names[a]).empty();
      const std::string text = never ? "-" : std::to_string(pairs.count[b][a]);
      out << std::string(text.size() < 4 ? 4 - text.size() : 1, ' ') << text;
    }
    out << "\n";
  }
  return out.str();
}

}  // namespace tessera::cases
