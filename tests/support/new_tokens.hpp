// SPDX-License-Identifier: Apache-2.0
// Trials of append: a call in any form with all that it points to, where each token is to go, and the judge of what the
// cache holds afterwards, against a rotation in float64. Included by the tests of append.
#pragma once

#include <cmath>
#include <map>
#include <sstream>

#include "core/tensor.hpp"
#include "tests/support/pages.hpp"

namespace tessera::test {

// How a call says where its tokens go; piece: the cache of a sequence is one piece.
enum class Where { table, indptr, apart, piece, slots };
// Of the cache: [1], [Hk], [B,Hk], or, computed, one for each token and head, or for each 128 dims of those.
enum class Scaled { no, all, by_head, by_sequence, by_token, by_group };

struct Trial {
  Where where = Where::table;
  bool packed = false, interleaved = false, positions = false, wide_slots = false, bad_entries = false;
  std::int64_t P = 4, Hk = 2, Hq = 4, D = 8, Dv = 6, rotated = 0, queries = 0;  // queries 0: none; packed: as keys
  Type from = Type::f32, to = Type::f32, v_to = Type::f32, trigonometry = Type::f32;
  std::vector<std::int64_t> counts{3, 1, 2};  // new tokens of each sequence; all the first one's if not packed
  std::vector<std::int64_t> before{5, 0, 9};  // places in use before
  Cache cache = Cache::tokens_first;
  std::uint64_t seed = 1;
  Scaled scaled = Scaled::no;
};

inline std::string describe(const Trial& t) {
  std::ostringstream out;
  out << "where " << static_cast<int>(t.where) << (t.packed ? " packed" : "") << (t.interleaved ? " interleaved" : "")
      << (t.positions ? " positions" : "") << " P " << t.P << " heads " << t.Hk << "/" << t.Hq << " dims " << t.D << "/"
      << t.Dv << " rotated " << t.rotated << " queries " << t.queries << " types " << cases::name_of(t.from) << " to "
      << cases::name_of(t.to) << "/" << cases::name_of(t.v_to) << " cache " << static_cast<int>(t.cache) << " seed "
      << t.seed << " scaled " << static_cast<int>(t.scaled);
  return out.str();
}

inline constexpr Where wheres[] = {Where::table, Where::indptr, Where::apart, Where::piece, Where::slots};

// Anything, without f64.
inline Trial random_trial(std::uint64_t seed) {
  constexpr Scaled forms[] = {Scaled::by_head, Scaled::by_token, Scaled::by_group};
  constexpr std::int64_t pages[] = {1, 2, 3, 5, 16};
  constexpr Type types[] = {Type::f32, Type::f16, Type::bf16};
  Generator g(seed);
  Trial t{.where = wheres[g.between(0, 4)], .packed = g.chance(0.5), .interleaved = g.chance(0.5)};
  t.positions = g.chance(0.3), t.wide_slots = g.chance(0.5), t.bad_entries = g.chance(0.4);
  t.P = pages[g.between(0, 4)], t.Hk = g.between(1, 3), t.Hq = t.Hk * g.between(1, 3);
  t.D = g.between(1, 40), t.Dv = g.between(1, 40), t.rotated = g.chance(0.7) ? 2 * g.between(0, t.D / 2) : 0;
  t.queries = g.chance(0.5) ? g.between(1, 6) : 0;
  t.from = types[g.between(0, 2)], t.to = types[g.between(0, 2)], t.v_to = types[g.between(0, 2)];
  t.trigonometry = g.chance(0.5) ? t.from : Type::f32;
  t.counts.clear(), t.before.clear();
  for (std::int64_t b = g.between(0, 5); b >= 0; --b)
    t.counts.push_back(g.between(0, 12)), t.before.push_back(g.between(0, 20));
  t.cache = caches[g.between(0, 4)], t.seed = seed;
  if (g.chance(0.3)) t.to = Type::e4m3, t.v_to = g.chance(0.5) ? Type::i8 : Type::e4m3;
  if (t.to == Type::e4m3 && g.chance(0.7)) t.scaled = forms[g.between(0, 2)];
  if (t.scaled == Scaled::by_group) t.D += 120, t.Dv += 240;
  return t;
}

inline void fill_normal(Buffer& buffer, Generator& g) {
  for (std::int64_t e = 0; e < buffer.elements(); ++e) buffer.set(e, g.normal());
}

// A call, all that it points to, and where each token is to go.
struct Prepared {
  Trial t;
  AppendArgs a;
  std::int64_t tokens = 0, pages = 1, entries = 0;
  std::vector<std::int64_t> sequence, place;  // of each token; sequence -1: padding
  std::vector<std::int64_t> k_row, v_row;     // page * P + place, or -1
  std::vector<std::int32_t> table, v_table, indptr, lengths, offsets, positions, narrow_slots;
  std::vector<std::int64_t> slots;
  Buffer k_new, v_new, k, v, cos, sin, q, q_out, k_scale, v_scale;
  std::int32_t status = 4;  // somebody else's bit
  bool outside = false;

  explicit Prepared(const Trial& trial) : t(trial) {
    Generator g(t.seed);
    const auto B = static_cast<std::int64_t>(t.counts.size());
    for (std::size_t b = 0; b < t.counts.size(); ++b) {
      if (!t.packed) t.counts[b] = t.counts[0];
      entries = std::max(entries, (t.before[b] + t.counts[b] + t.P - 1) / t.P);
    }
    make_tokens(g, B);
    make_cache(g, B);
    if (t.where == Where::slots)
      choose_slots(g);
    else
      follow_tables();
    make_rotation(g, B);
    if (t.scaled != Scaled::no) {
      k_scale = make_scale(g, B, t.D), v_scale = make_scale(g, B, t.Dv);
      a.k_scale = k_scale.tensor(), a.v_scale = v_scale.tensor();
    }
    a.status = t.where == Where::piece ? Tensor{} : Tensor(&status, Type::i32, {1});
  }
  Prepared(const Prepared&) = delete;

  std::int64_t position(std::size_t token) const { return t.positions ? positions[token] : place[token]; }

 private:
  void make_tokens(Generator& g, std::int64_t B) {
    const std::int64_t front = t.packed && t.where != Where::slots ? 2 : 0;  // rows of no sequence
    offsets = {static_cast<std::int32_t>(front)};
    sequence.assign(static_cast<std::size_t>(front), -1), place = sequence;
    for (std::int64_t b = 0; b < B; ++b)
      for (std::int64_t n = 0; n < t.counts[static_cast<std::size_t>(b)]; ++n)
        sequence.push_back(b), place.push_back(t.before[static_cast<std::size_t>(b)] + n);
    for (const std::int64_t n : t.counts) offsets.push_back(offsets.back() + static_cast<std::int32_t>(n));
    tokens = static_cast<std::int64_t>(sequence.size());
    const auto shape = [&](std::int64_t heads, std::int64_t width) {
      return t.packed ? Shape{tokens, heads, width} : Shape{B, t.counts[0], heads, width};
    };
    const Layout layout = t.packed ? Layout{.gap = 3, .shift = 1} : Layout{.order = {0, 2, 1, 3}, .shift = 1};
    k_new = Buffer(t.from, shape(t.Hk, t.D), layout), v_new = Buffer(t.from, shape(t.Hk, t.Dv), layout);
    fill_normal(k_new, g), fill_normal(v_new, g);
    a.k_new = k_new.tensor(), a.v_new = v_new.tensor(), a.interleaved = t.interleaved;
    for (std::size_t b = 0; b < t.counts.size(); ++b)
      lengths.push_back(static_cast<std::int32_t>(t.before[b] + t.counts[b]));
    if (t.where != Where::slots) a.seqused_k = Tensor(lengths.data(), Type::i32, {B});
    if (t.packed && t.where != Where::slots) a.cu_seqlens_new = Tensor(offsets.data(), Type::i32, {B + 1});
  }

  void make_cache(Generator& g, std::int64_t B) {
    const bool piece = t.where == Where::piece;
    const std::int64_t P = piece ? entries * t.P : t.P;
    pages = piece ? B : B * entries + 3;
    const Layout layout{.order = t.cache == Cache::heads_first ? std::array{0, 2, 1, 3} : std::array{0, 1, 2, 3},
                        .gap = t.cache == Cache::tokens_first ? 5 : 0};
    if (t.cache == Cache::slices && t.to == t.v_to) {  // K | V in one last dimension
      k = Buffer(t.to, {pages, P, t.Hk, t.D + t.Dv}, layout);
      a.k = a.v = k.tensor();
      a.k.shape[3] = t.D, a.v.shape[3] = t.Dv;
      a.v.data = static_cast<std::byte*>(a.v.data) + t.D * tessera::size_of(t.to);
    } else {
      k = Buffer(t.to, {pages, P, t.Hk, t.D}, layout), v = Buffer(t.v_to, {pages, P, t.Hk, t.Dv}, layout);
      a.k = k.tensor(), a.v = v.tensor();
    }
    t.P = P;
    if (piece || t.where == Where::slots) return;
    const auto shuffled = [&] {
      std::vector<std::int32_t> list(static_cast<std::size_t>(pages));
      std::iota(list.begin(), list.end(), 0);
      for (std::size_t n = list.size(); n > 1; --n)
        std::swap(list[n - 1], list[static_cast<std::size_t>(g.between(0, static_cast<std::int64_t>(n) - 1))]);
      list.resize(static_cast<std::size_t>(B * entries));
      for (auto& page : list)
        if (t.bad_entries && g.chance(0.3)) page = g.chance(0.5) ? -1 : static_cast<std::int32_t>(pages);
      return list;
    };
    table = shuffled();
    v_table = t.where == Where::apart ? shuffled() : table;
    for (std::int64_t b = 0; b <= B; ++b) indptr.push_back(static_cast<std::int32_t>(b * entries));
    if (t.where == Where::indptr) {
      a.page_indptr = Tensor(indptr.data(), Type::i32, {B + 1});
      a.page_indices = Tensor(table.data(), Type::i32, {B * entries});
    } else {
      a.block_table = Tensor(table.data(), Type::i32, {B, entries});
      if (t.where == Where::apart) a.v_block_table = Tensor(v_table.data(), Type::i32, {B, entries});
    }
  }

  void follow_tables() {
    for (std::size_t n = 0; n < sequence.size(); ++n) {
      const std::int64_t b = sequence[n], j = place[n];
      const auto row = [&](const std::vector<std::int32_t>& list) -> std::int64_t {
        if (b < 0) return -1;
        if (t.where == Where::piece) return b * t.P + j;
        const std::int64_t page = list[static_cast<std::size_t>(b * entries + j / t.P)];
        outside = outside || page < 0 || page >= pages;
        return page < 0 || page >= pages ? -1 : page * t.P + j % t.P;
      };
      k_row.push_back(row(table)), v_row.push_back(row(v_table));
    }
  }

  void choose_slots(Generator& g) {
    std::vector<std::int64_t> all(static_cast<std::size_t>(pages * t.P));
    std::iota(all.begin(), all.end(), 0);
    for (std::int64_t n = 0; n < tokens; ++n) {
      const auto at = static_cast<std::size_t>(g.between(0, static_cast<std::int64_t>(all.size()) - 1));
      std::int64_t slot = all[at];
      all.erase(all.begin() + static_cast<std::ptrdiff_t>(at));
      if (g.chance(0.2)) slot = -1 - g.between(0, 5);
      const bool bad = t.bad_entries && g.chance(0.2);
      if (bad) slot = pages * t.P + g.between(0, 2), outside = true;
      slots.push_back(slot), narrow_slots.push_back(static_cast<std::int32_t>(slot));
      k_row.push_back(bad || slot < 0 ? -1 : slot), v_row.push_back(k_row.back());
    }
    a.slots =
        t.wide_slots ? Tensor(slots.data(), Type::i64, {tokens}) : Tensor(narrow_slots.data(), Type::i32, {tokens});
    if (!t.packed) a.slots.ndim = 2, a.slots.shape = a.k_new.shape, a.slots.strides = {a.k_new.shape[1], 1, 0, 0};
  }

  Buffer make_scale(Generator& g, std::int64_t B, std::int64_t width) const {
    if (t.scaled == Scaled::by_group)
      return Buffer(Type::f32, {pages, t.P, t.Hk, (width + 127) / 128}, {.order = {0, 3, 2, 1}, .gap = 1});
    if (t.scaled == Scaled::by_token) return Buffer(Type::f32, {pages, t.P, t.Hk}, {.order = {0, 2, 1, 3}, .gap = 1});
    const Shape shapes[] = {{1}, {t.Hk}, {B, t.Hk}};
    Buffer scale(Type::f32, shapes[static_cast<int>(t.scaled) - 1]);
    for (std::int64_t e = 0; e < scale.elements(); ++e) scale.set(e, 0.02 * (0.1 + g.uniform()));
    return scale;
  }

  void make_rotation(Generator& g, std::int64_t B) {
    if (t.rotated == 0) return;
    const std::int64_t rows = 40;
    cos = Buffer(t.trigonometry, {rows, t.rotated / 2}, {.gap = 2}),
    sin = Buffer(t.trigonometry, {rows, t.rotated / 2});
    for (std::int64_t e = 0; e < cos.elements(); ++e) {
      const double angle = 6.2831853 * g.uniform();
      cos.set(e, std::cos(angle)), sin.set(e, std::sin(angle));
    }
    a.rotary_cos = cos.tensor(), a.rotary_sin = sin.tensor();
    t.positions = t.positions || t.where == Where::slots;
    for (std::int64_t n = 0; n < tokens; ++n) positions.push_back(static_cast<std::int32_t>(g.between(0, rows - 1)));
    a.positions = t.packed ? Tensor(positions.data(), Type::i32, {tokens})
                           : Tensor(positions.data(), Type::i32, {B, t.counts[0]});
    if (!t.positions) a.positions = {};
    if (t.queries == 0) return;
    const std::int64_t queries = t.positions ? t.counts[0] : t.queries;
    const Shape shape = t.packed ? Shape{tokens, t.Hq, t.D} : Shape{B, queries, t.Hq, t.D};
    q = Buffer(t.from, shape), q_out = Buffer(t.from, shape, {.gap = 1});
    fill_normal(q, g);
    a.q = q.tensor(), a.q_out = q_out.tensor();
  }
};

struct Exact {
  double value, size;  // size: of the terms, whose rounding may show
};

// Element d of a row of head h, rotated to a position in float64.
inline Exact rotated(const Prepared& p, const Buffer& rows, std::int64_t first, std::int64_t d, std::int64_t position) {
  const std::int64_t half = p.t.rotated / 2;
  if (position < 0 || d >= p.t.rotated) return {rows.get(first + d), 0};
  const std::int64_t pair = p.t.interleaved ? d / 2 : d % half;
  const bool second = p.t.interleaved ? d % 2 == 1 : d >= half;
  const double x = rows.get(first + (p.t.interleaved ? 2 * pair : pair));
  const double y = rows.get(first + (p.t.interleaved ? 2 * pair + 1 : pair + half));
  const double c = p.cos.get(position * half + pair), s = p.sin.get(position * half + pair);
  // Volatile: rounded, whatever the compiler would like to make of a product and a sum.
  const volatile double left = second ? x * s : x * c, right = second ? y * c : -y * s;
  return {left + right, std::abs(left) + std::abs(right)};
}

// The one rounding to the type, and three of f32 on the way.
inline void expect_rounded(double got, const Exact& exact, Type type, const std::string& what) {
  const double allowed = 0.5 * spacing(type, exact.value) * 1.001 + (type == Type::f64 ? 0 : 3 * 0x1p-24) * exact.size;
  ASSERT_LE(std::abs(got - exact.value), allowed) << what << ": " << got << " and not " << exact.value;
}

// Of eight bits: numbers beyond the largest become it; a subnormal e4m3's last bit counts 2^-9.
inline void expect_code(double got, const Exact& exact, Type type, double scale, const std::string& what) {
  const double most = type == Type::i8 ? 127 : 448, least = type == Type::i8 ? -128 : -448;
  const double wanted = std::clamp(exact.value / scale, least, most);
  const double ulp = type == Type::i8 ? 1 : std::max(std::exp2(std::floor(std::log2(std::abs(wanted))) - 3), 0x1p-9);
  const double allowed = 0.5 * ulp * 1.001 + 4 * 0x1p-24 * (exact.size / std::abs(scale) + std::abs(wanted));
  ASSERT_LE(std::abs(got - wanted), allowed) << what << ": " << got << " and not " << wanted;
}

// The scale of a row, head and group of dims that is judged, and, if it was computed, whether it is the right one.
inline double scale_of(const Prepared& p, bool value, std::int64_t row, std::int64_t h, std::int64_t group,
                       std::size_t token, double largest) {
  const Buffer& scale = value ? p.v_scale : p.k_scale;
  if (p.t.scaled == Scaled::no) return 1;
  if (p.t.scaled == Scaled::all) return scale.get(0);
  if (p.t.scaled == Scaled::by_head) return scale.get(h);
  if (p.t.scaled == Scaled::by_sequence) return scale.get(p.sequence[token] * p.t.Hk + h);
  const std::int64_t groups = p.t.scaled == Scaled::by_group ? scale.size(3) : 1;
  const double limit = (value ? p.t.v_to : p.t.to) == Type::i8 ? 127 : 448;
  const double got = scale.get((row * p.t.Hk + h) * groups + group);
  EXPECT_NEAR(got, largest / limit, 1e-6 * largest) << "scale of row " << row;
  return got;
}

// A side of the cache: rows of tokens are as they should be, all others as they were.
inline void judge_side(const Prepared& p, bool value) {
  const Tensor& cache = value ? p.a.v : p.a.k;
  const Buffer& rows = value ? p.v_new : p.k_new;
  const std::vector<std::int64_t>& target = value ? p.v_row : p.k_row;
  const std::int64_t H = p.t.Hk, width = value ? p.t.Dv : p.t.D;
  const std::int64_t group_width = p.t.scaled == Scaled::by_group ? 128 : width, groups = (width - 1) / group_width + 1;
  std::map<std::int64_t, std::size_t> token_of;
  for (std::size_t n = 0; n < target.size(); ++n)
    if (target[n] >= 0) token_of[target[n]] = n;
  const bool eight_bits = cache.type == Type::e4m3 || cache.type == Type::i8;
  for (std::int64_t row = 0; row < p.pages * p.t.P; ++row)
    for (std::int64_t h = 0; h < H; ++h) {
      const auto stored = [&](std::int64_t d) {
        return load_element(cache.data, cache.type,
                            row / p.t.P * cache.strides[0] + row % p.t.P * cache.strides[1] + h * cache.strides[2] + d);
      };
      const auto found = token_of.find(row);
      if (found == token_of.end()) {
        for (std::int64_t d = 0; d < width; ++d)  // 0xff in every type
          ASSERT_TRUE(stored(d) != stored(d) || (cache.type == Type::i8 && stored(d) == -1)) << "row " << row;
        for (std::int64_t g = 0; g < groups && p.t.scaled >= Scaled::by_token; ++g)
          ASSERT_TRUE((value ? p.v_scale : p.k_scale).untouched((row * H + h) * groups + g)) << "scale of row " << row;
        continue;
      }
      const std::size_t n = found->second;
      const std::int64_t first = (static_cast<std::int64_t>(n) * H + h) * width;
      const std::int64_t position = !value && p.t.rotated > 0 ? p.position(n) : -1;
      std::vector<double> largest(static_cast<std::size_t>(groups)), scales;
      for (std::int64_t d = 0; d < width; ++d) {
        double& most = largest[static_cast<std::size_t>(d / group_width)];
        most = std::max(most, std::abs(rotated(p, rows, first, d, position).value));
      }
      for (std::int64_t g = 0; g < groups; ++g)
        scales.push_back(scale_of(p, value, row, h, g, n, largest[static_cast<std::size_t>(g)]));
      const std::string what = (value ? "v of token " : "k of token ") + std::to_string(n);
      for (std::int64_t d = 0; d < width; ++d) {
        const double scale = scales[static_cast<std::size_t>(d / group_width)];
        Exact exact = rotated(p, rows, first, d, position);
        if (eight_bits) {
          expect_code(stored(d), exact, cache.type, scale, what);
        } else {
          exact = {exact.value / scale, exact.size / scale + (scale == 1 ? 0 : std::abs(exact.value / scale))};
          expect_rounded(stored(d), exact, cache.type, what);
        }
        if (testing::Test::HasFatalFailure()) return;
      }
    }
}

inline void judge_queries(const Prepared& p) {
  if (!p.q) return;
  const std::int64_t per_sequence = p.t.packed ? 0 : p.q.size(1);
  for (std::int64_t row = 0; row < p.q.elements() / p.t.D; ++row) {
    const auto n = static_cast<std::size_t>(row / p.t.Hq);
    const bool padding = p.t.packed && p.sequence[n] < 0;
    std::int64_t position = 0;
    if (p.t.positions || p.t.packed)
      position = p.position(n);
    else
      position = p.t.before[n / static_cast<std::size_t>(per_sequence)] + row / p.t.Hq % per_sequence;
    for (std::int64_t d = 0; d < p.t.D; ++d) {
      if (padding) {
        ASSERT_TRUE(p.q_out.untouched(row * p.t.D + d));
        continue;
      }
      expect_rounded(p.q_out.get(row * p.t.D + d), rotated(p, p.q, row * p.t.D, d, position), p.t.from, "q");
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

// Of one trial, on so many threads.
inline void judge(const Trial& trial, int threads) {
  SCOPED_TRACE(describe(trial));
  Prepared p(trial);
  append(p.a, {.threads = threads});
  judge_side(p, false), judge_side(p, true), judge_queries(p);
  EXPECT_EQ(p.status, 4 | (p.outside && p.a.status ? page_outside_pool : 0));
  EXPECT_TRUE(p.k.margins_intact() && (!p.v || p.v.margins_intact()) && (!p.q_out || p.q_out.margins_intact()));
  EXPECT_TRUE(!p.k_scale || (p.k_scale.margins_intact() && p.v_scale.margins_intact()));
  ++case_count.judged;
}

}  // namespace tessera::test
