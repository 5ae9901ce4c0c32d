// SPDX-License-Identifier: Apache-2.0
// What the `decode` kernels' own text is run on without a GPU: small cases in groups, each for the tiles of one
// architecture. Included by the test that runs them (decode_machine_test.cpp) and by the program that asks the planner
// for their units (units_main.cpp).
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "cases/case.hpp"
#include "core/check.hpp"
#include "cuda/device.hpp"
#include "decode/algorithms.hpp"

namespace tessera::decode {

struct DecodeCase {
  cases::Case spec;  // its name is that of its group
  const char* architecture = "sm_90a";
  double growth = 0;  // keys grow by this factor of their position: scores jump from tile to tile
};

inline constexpr std::int64_t lengths[] = {0, 1, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1100};

class DecodeCases {
 public:
  std::vector<DecodeCase> all;

  // In bf16, unless the case says otherwise.
  void add(cases::Case c, const char* architecture = "sm_90a", double growth = 0) {
    if (c.type == Type::f32) c.type = Type::bf16;
    c.backward = false, c.seed = all.size() + 1;
    all.push_back({std::move(c), architecture, growth});
  }
};

// Queries and heads of a KV head that make so many rows.
inline cases::Case with_rows(const char* name, std::int64_t Nq, std::int64_t group, std::int64_t Nk) {
  return {.name = name, .Nq = Nq, .Nk = Nk, .Hq = group, .Hk = 1, .D = 64};
}

inline void add_shapes(DecodeCases& c) {
  for (const std::int64_t Nk : lengths) c.add({.name = "Lengths", .Nq = 1, .Nk = Nk, .Hq = 3, .Hk = 1});
  c.add({.name = "Lengths", .B = 4, .Nq = 1, .Nk = 600, .Hq = 2, .Hk = 1, .used_k = {600, 0, 1, 257}});

  const std::pair<std::int64_t, std::int64_t> rows[] = {{1, 1}, {7, 1}, {2, 4}, {3, 3}, {17, 1}, {9, 7}, {8, 8}};
  for (const auto& [Nq, group] : rows) {
    cases::Case spec = with_rows("Rows", Nq, group, 300);
    c.add(spec);
    spec.options.causal = true, spec.Nk = 258 + Nq;
    c.add(spec);
  }

  c.add({.name = "HeadDims", .Nq = 1, .Nk = 600, .Hq = 4, .Hk = 2, .D = 128});
  c.add({.name = "HeadDims", .Nq = 1, .Nk = 300, .Hq = 4, .Hk = 2, .D = 40});
  c.add({.name = "HeadDims", .Nq = 2, .Nk = 300, .Hq = 2, .Hk = 1, .D = 80, .Dv = 72});
  c.add({.name = "HeadDims", .Nq = 1, .Nk = 300, .Hq = 2, .Hk = 1, .D = 192, .Dv = 128, .type = Type::f16});
  for (const char* architecture : {"sm_89", "sm_80"})
    c.add({.name = "HeadDims", .Nq = 2, .Nk = 300, .Hq = 2, .Hk = 1, .D = 256, .type = Type::f16}, architecture);
  // No tile of 64 such rows fits: several tiles of fewer.
  c.add({.name = "HeadDims", .Nq = 8, .Nk = 270, .Hq = 8, .Hk = 1, .D = 256}, "sm_89");
}

inline void add_masks(DecodeCases& c) {
  for (const Alignment alignment : {Alignment::bottom_right, Alignment::top_left}) {
    cases::Case spec = with_rows("Causal", 8, 2, 600);
    spec.options.causal = true, spec.options.alignment = alignment;
    c.add(spec);
    spec.Nk = 5;  // most rows see nothing at the bottom right
    c.add(spec);
  }
  cases::Case offset = with_rows("Causal", 8, 2, 600);
  offset.options = {.causal = true, .alignment = Alignment::offset, .diagonal_offset = 254, .row0 = 3, .col0 = 1};
  c.add(offset);

  // The window's edge before, on and behind that of a leaf; leaves before it are never visited.
  for (const std::int64_t left : {0, 1, 42, 43, 44, 299, 300, 301, 2000}) {
    cases::Case spec = with_rows("Windows", 1, 3, 555);
    spec.options.window_left = left, spec.options.causal = true;
    c.add(spec);
  }
  for (const std::int64_t Nq : {8, 16}) {
    cases::Case spec = with_rows("Windows", Nq, 1, 1500);
    spec.options.window_left = 500, spec.options.window_right = 3;
    c.add(spec);
    spec.options.alignment = Alignment::top_left, spec.options.window_left = 5;
    c.add(spec);
  }
  c.add({.name = "Packed",
         .Hq = 4,
         .Hk = 2,
         .D = 64,
         .options = {.causal = true, .max_seqlen_q = 4},
         .packed_q = {1, 0, 4, 2},
         .packed_k = {300, 10, 0, 513},
         .front_q = 3,
         .front_k = 5,
         .tail_q = 2,
         .tail_k = 7});
  c.add({.name = "Packed",
         .Hq = 2,
         .Hk = 2,
         .D = 64,
         .options = {.max_seqlen_q = 8},
         .packed_q = {8, 3, 8},
         .packed_k = {100, 257, 30},
         .used_q = {8, 2, 0},
         .used_k = {99, 256, 30}});
  c.add({.name = "UsedLengths",
         .B = 3,
         .Nq = 4,
         .Nk = 400,
         .Hq = 2,
         .Hk = 1,
         .D = 64,
         .options = {.causal = true},
         .used_q = {4, 1, 0},
         .used_k = {400, 256, 7}});
  for (const cases::Style style : {cases::Style::heads_first, cases::Style::broadcast})
    c.add({.name = "Layouts", .B = 2, .Nq = 2, .Nk = 300, .Hq = 4, .Hk = 2, .D = 64, .style = style});
}

inline void add_scores(DecodeCases& c) {
  const auto few = [](const char* name) {
    return cases::Case{.name = name, .Nq = 2, .Nk = 400, .Hq = 4, .Hk = 2, .D = 64};
  };
  for (const double softcap : {0.0, 1.5})
    for (const bool alibi : {false, true}) {
      cases::Case spec = few("Options");
      spec.options.softcap = softcap, spec.options.causal = alibi;
      if (alibi) spec.B = 2, spec.slopes = cases::Slopes::per_batch_head, spec.options.col0 = 5;
      spec.sinks = cases::Sinks::some_infinite;
      c.add(spec);
    }
  cases::Case sinks = few("Options");
  sinks.sinks = cases::Sinks::finite, sinks.Nk = 0;
  c.add(sinks);
  sinks.Nk = 300, sinks.sinks = cases::Sinks::high;
  c.add(sinks);
  for (const double scale : {0.0, -0.25}) {
    cases::Case spec = few("Options");
    spec.options.scale = scale;
    c.add(spec);
  }
  cases::Case wide = few("Options");
  wide.f32_o = wide.no_lse = true, wide.D = 64, wide.Dv = 72;
  c.add(wide);

  for (const auto distribution : {cases::Distribution::cold, cases::Distribution::huge, cases::Distribution::outlier,
                                  cases::Distribution::structured}) {
    cases::Case spec = few("ExtremeNumbers");
    spec.distribution = distribution, spec.Nk = 700;
    c.add(spec);
    spec.type = Type::f16, spec.D = 192, spec.Dv = 128, spec.Hq = 2, spec.Hk = 1, spec.Nk = 270;
    c.add(spec);
  }
  for (const double growth : {0.1, 3.0}) c.add(few("ExtremeNumbers"), "sm_90a", growth);
}

// Scales of 128 dims: of one group, of two, of keys or values alone; with all that products with values need.
inline void add_groups(DecodeCases& c) {
  using cases::Scales;
  const auto grouped = [](std::int64_t D, std::int64_t Dv, cases::Cached k, cases::Cached v) {
    cases::Case spec{.name = "Groups", .B = 2, .Nq = 2, .Nk = 270, .Hq = 4, .Hk = 2, .D = D, .Dv = Dv};
    spec.used_k = {270, 65}, spec.cached_k = k, spec.cached_v = v;
    return spec;
  };
  const cases::Cached bytes{Type::e4m3, Scales::per_group}, integers{Type::i8, Scales::per_group};
  c.add(grouped(64, 64, bytes, bytes));
  c.add(grouped(256, 256, bytes, bytes));
  c.add(grouped(192, 128, integers, {Type::i8, Scales::per_key}));
  c.add(grouped(128, 208, {Type::e4m3, Scales::per_head}, bytes));
  cases::Case wide = grouped(256, 256, {.scales = Scales::per_group}, {.scales = Scales::per_group});
  c.add(wide), wide.type = Type::f16, wide.Nq = 9, wide.options.causal = true;
  c.add(wide, "sm_89");
  for (const double size : {0x1p-60, 0x1p60}) {
    cases::Case spec = grouped(192, 192, bytes, {Type::e4m3, Scales::per_group, size});
    spec.B = 1, spec.Hk = 1, spec.used_k.clear(), spec.cached_k.size = size == 0x1p60 ? 1 : size;
    c.add(spec);
  }
  cases::Case latent = grouped(64, 512, bytes, bytes);
  latent.qv = true, latent.Hk = 1, latent.B = 1, latent.used_k.clear(), latent.Nk = 140;
  c.add(latent);
}

// Keys and values of 8 bits, and scales of every form and size.
inline void add_eight_bits(DecodeCases& c) {
  using cases::Scales;
  const auto cached = [](const char* name, std::int64_t D, cases::Cached k, cases::Cached v) {
    cases::Case spec{.name = name, .B = 2, .Nq = 2, .Nk = 300, .Hq = 4, .Hk = 2, .D = D};
    spec.used_k = {300, 65}, spec.cached_k = k, spec.cached_v = v;
    return spec;
  };
  for (const Scales form : {Scales::one, Scales::per_head, Scales::per_sequence, Scales::per_key})
    c.add(cached("Scales", 64, {Type::e4m3, form}, {Type::e4m3, form}));
  for (const double size : {0.0, 0x1p-140, 0x1p-60, 0x1p60}) {
    cases::Case spec = cached("Scales", 64, {Type::e4m3, Scales::per_key, size == 0x1p60 ? 1 : size},
                              {Type::e4m3, Scales::per_key, size});
    spec.B = 1, spec.Hk = 1, spec.Hq = 3, spec.used_k.clear();
    c.add(spec);
    spec.cached_k.size = size, spec.cached_v.size = 1;
    c.add(spec);
  }
  // Of 16 bits with scales; of one side only.
  c.add(cached("Scales", 64, {.scales = Scales::per_key}, {.scales = Scales::per_key}));
  c.add(cached("Scales", 64, {.scales = Scales::per_head}, {}));
  c.add(cached("Scales", 64, {}, {.scales = Scales::per_sequence}));

  c.add(cached("EightBits", 128, {.type = Type::e4m3}, {.type = Type::e4m3}));
  cases::Case packed = cached("EightBits", 128, {Type::i8, Scales::per_key}, {Type::i8, Scales::per_head});
  packed.used_k.clear(), packed.packed_q = {1, 0, 2}, packed.packed_k = {300, 7, 65}, packed.front_k = 5;
  packed.options.max_seqlen_q = 2, packed.type = Type::f16;
  c.add(packed);
  cases::Case mixed = cached("EightBits", 64, {Type::e4m3, Scales::per_key}, {Type::i8, Scales::per_head});
  mixed.Dv = 128, mixed.Nq = 7, mixed.options.causal = true, mixed.options.window_left = 200;
  c.add(mixed);
  cases::Case half = cached("EightBits", 48, {}, {.type = Type::e4m3});
  half.type = Type::f16, half.f32_o = true;
  c.add(half);
  for (const auto distribution : {cases::Distribution::huge, cases::Distribution::outlier}) {
    cases::Case wide = cached("EightBits", 128, {.type = Type::e4m3}, {.type = Type::e4m3});
    wide.distribution = distribution, wide.options.softcap = 0;
    c.add(wide);
  }
  add_groups(c);
  cases::Case large = cached("EightBits", 256, {.type = Type::i8}, {.type = Type::i8});
  large.Nq = 9, large.options.causal = true, large.cached_k.scales = large.cached_v.scales = Scales::per_key;
  c.add(large, "sm_89");
}

// Trees of draft tokens and places of queries; scores with values (MLA), and the widest heads.
inline void add_drafts(DecodeCases& c) {
  for (const cases::Tree tree : {cases::Tree::chain, cases::Tree::star, cases::Tree::random, cases::Tree::blind})
    for (const bool positions : {false, true}) {
      cases::Case spec = with_rows("Trees", 8, 1, 300);
      spec.tree = tree, spec.positions = positions, spec.options.causal = true, spec.B = 2, spec.used_k = {300, 258};
      c.add(spec);
      spec.options.window_left = 100, spec.sinks = cases::Sinks::finite, spec.used_k = {5, 70};
      c.add(spec);
    }
  cases::Case many = with_rows("Trees", 33, 1, 290);
  many.tree = cases::Tree::random, many.slopes = cases::Slopes::per_head, many.positions = true;
  c.add(many);

  cases::Case qv{.name = "Qv", .B = 2, .Nq = 2, .Nk = 300, .Hq = 4, .Hk = 1, .D = 64, .Dv = 128};
  qv.qv = true, qv.used_k = {300, 64}, qv.options.causal = true;
  c.add(qv);
  qv.Nq = 1, qv.Hq = 16, qv.Dv = 512, qv.B = 1, qv.used_k = {}, qv.Nk = 270;
  c.add(qv);
  qv.Hq = 3, qv.cached_k = {Type::e4m3, cases::Scales::per_key}, qv.cached_v = qv.cached_k;
  c.add(qv);
  qv.cached_k = qv.cached_v = {}, qv.Nk = 130;
  for (const char* architecture : {"sm_80", "sm_89"}) c.add(qv, architecture);
  qv.type = Type::f16;
  c.add(qv);
  c.add({.name = "Qv", .Nq = 1, .Nk = 130, .Hq = 2, .Hk = 1, .D = 576, .Dv = 512});
}

// More rows than a tile has: prompts, alone and beside sequences of few queries, and more heads than a tile.
inline void add_many_rows(DecodeCases& c) {
  cases::Case spec = with_rows("ManyRows", 70, 1, 300);
  c.add(spec);
  spec.options.causal = true;
  c.add(spec);
  spec.options.window_left = 40, spec.Nk = 30, spec.B = 2, spec.used_q = {70, 3}, spec.used_k = {30, 7};
  c.add(spec);
  cases::Case packed = with_rows("ManyRows", 0, 3, 0);
  packed.options.causal = true, packed.packed_q = {1, 50, 0, 22}, packed.packed_k = {300, 257, 10, 22};
  packed.front_q = 3, packed.tail_q = 2;
  c.add(packed);
  c.add(with_rows("ManyRows", 1, 128, 70));
}

inline std::vector<DecodeCase> decode_cases() {
  DecodeCases c;
  add_shapes(c), add_masks(c), add_scores(c), add_many_rows(c);
  return c.all;
}

// Trees, 8 bits, scales of both fine forms, and MLA's 128 heads.
inline void add_many_cached_rows(DecodeCases& c) {
  cases::Case tree = with_rows("ManyRows", 70, 1, 290);
  tree.tree = cases::Tree::random, tree.slopes = cases::Slopes::per_head, tree.positions = true;
  c.add(tree);
  tree.positions = false, tree.options.causal = true, tree.options.window_left = 100, tree.Nk = 100;
  c.add(tree);
  cases::Case bytes{.name = "ManyRows", .B = 2, .Nq = 33, .Nk = 140, .Hq = 2, .Hk = 1, .D = 256};
  bytes.options.causal = true, bytes.used_k = {140, 20};
  bytes.cached_k = bytes.cached_v = {Type::i8, cases::Scales::per_key};
  c.add(bytes, "sm_89");
  bytes.cached_k = bytes.cached_v = {.scales = cases::Scales::per_group}, bytes.type = Type::f16;
  c.add(bytes, "sm_89");
  cases::Case latent{.name = "ManyRows", .Nq = 1, .Nk = 70, .Hq = 128, .Hk = 1, .D = 64, .Dv = 512};
  latent.qv = true, latent.options.causal = true;
  c.add(latent);
}

// Those of decode_caches_test.cpp, whose units are others.
inline std::vector<DecodeCase> decode_cache_cases() {
  DecodeCases c;
  add_eight_bits(c), add_drafts(c), add_many_cached_rows(c);
  return c.all;
}

// Of a GPU with so many multiprocessors.
inline cuda::Target target_of(const char* architecture, int multiprocessors) {
  cuda::Target target = cuda::target_named(architecture);
  target.multiprocessors = multiprocessors;
  return target;
}

// Short sequences in a plan that has room for long ones, of 8 rows and of more: by blocks of many keys.
inline constexpr std::int64_t much_room = 16384;
inline std::vector<cases::Case> short_sequences() {
  std::vector<cases::Case> out;
  for (const std::int64_t Nq : {1, 3, 17}) {
    cases::Case spec = with_rows("Short", Nq, 3, 800);
    spec.D = 128, spec.type = Type::bf16, spec.backward = false, spec.B = 4, spec.used_k = {800, 0, 65, 513};
    spec.options.causal = true, spec.distribution = cases::Distribution::outlier;
    out.push_back(spec);
    spec.options.window_left = 300, spec.distribution = cases::Distribution::normal;
    out.push_back(spec);
  }
  return out;
}

// By `decode_direct`; by `decode_queue`, or by `decode_many`.
inline gpu::Steps steps_of(const Problem& problem, const cuda::Target& target, bool direct = false) {
  if (direct) return algorithms().front().plan(problem, target);
  return (rows_of(problem) > most_rows ? fallbacks() : algorithms()).back().plan(problem, target);
}

// --- what invariance is tested on

// One sequence of the tests of invariance: rows of a query and its heads, keys that end inside a leaf.
inline cases::Case lone_sequence(std::int64_t Nq, std::int64_t group, bool options) {
  cases::Case spec = with_rows("lone", Nq, group, 1111);
  spec.type = Type::bf16, spec.backward = false, spec.seed = 99, spec.options.causal = true;
  if (options) spec.options.softcap = 3, spec.sinks = cases::Sinks::finite, spec.options.window_left = 700;
  return spec;
}

// Values of so many dims, with scales of 128 of them.
inline cases::Case grouped_sequence(std::int64_t Dv) {
  cases::Case spec = lone_sequence(1, 3, false);
  spec.D = 64, spec.Dv = Dv, spec.Nk = 600;
  spec.cached_k = {.type = Type::e4m3}, spec.cached_v = {Type::e4m3, cases::Scales::per_group};
  return spec;
}

// Units beyond those of the cases: paged ones of these shapes, on these architectures.
struct PagedShape {
  std::int64_t Nq, group;
  bool options;
};
inline constexpr PagedShape paged_shapes[] = {{1, 3, false}, {4, 3, false}, {22, 3, false}};

// The same with keys and values of 8 bits, each with a scale.
inline cases::Case lone_sequence_of_bytes() {
  cases::Case spec = lone_sequence(1, 3, false);
  spec.cached_k = spec.cached_v = {Type::e4m3, cases::Scales::per_key};
  return spec;
}

}  // namespace tessera::decode
