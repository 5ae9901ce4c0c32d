// SPDX-License-Identifier: Apache-2.0
// The table of what broke other implementations: lengths at tile edges, empty things, masks that hide everything,
// extreme numbers, odd head dimensions and memory layouts.
// Part of tessera_cases; see tables.hpp. Implements the contract's list "Edge cases that broke others".
#include <limits>

#include "cases/tables.hpp"
#include "cases/tiles.hpp"

namespace tessera::cases {

namespace {

constexpr Type types[] = {Type::f32, Type::f16, Type::bf16};

// Lists that are one number per case: the types take turns, so that neighbours differ in type as well.
class Rows {
 public:
  void add(Case c) {
    c.type = types[all.size() % 3], c.seed = all.size() + 1;
    all.push_back(std::move(c));
  }
  void add_in_each_type(const Case& c) {
    for (Case& typed : typed_rows(c)) all.push_back(std::move(typed));
  }
  std::vector<Case> all;

 private:
  std::vector<Case> typed_rows(const Case& c) const {
    std::vector<Case> rows = in_types({c}, {types[0], types[1], types[2]});
    for (std::size_t n = 0; n < rows.size(); ++n) rows[n].seed = all.size() + n + 1;
    return rows;
  }
};

std::string join(const std::string& a, std::int64_t x) { return a + "_" + std::to_string(x); }
std::string join(const std::string& a, std::int64_t x, std::int64_t y) { return join(join(a, x), y); }

void lengths(Rows& rows) {
  for (std::int64_t n : {std::int64_t{1}, std::int64_t{2}, std::int64_t{3}, std::int64_t{17}, tile_q - 1, tile_q,
                         tile_q + 1, 2 * tile_q + 1, tile_other - 1, tile_other, tile_k - 1, tile_k, tile_k + 1,
                         2 * tile_other + 1, 2 * tile_k + 1}) {
    rows.add({.name = join("length", n), .Nq = n, .Nk = n, .D = 24});
    rows.add({.name = join("length_causal", n), .Nq = n, .Nk = n, .D = 24, .options = {.causal = true}});
  }
  struct Pair {
    std::int64_t q, k, D, H;
  };
  for (const Pair& p : {Pair{1, 239, 32, 2},
                        {239, 1, 32, 2},
                        {3, 799, 32, 2},
                        {799, 3, 32, 2},
                        {113, 203, 32, 2},
                        {1023, 1024, 16, 1},
                        {tile_q + 1, tile_k - 1, 40, 2},
                        {2 * tile_q + 1, 2 * tile_k + 1, 8, 1}}) {
    const Case c{.name = join("lengths", p.q, p.k), .Nq = p.q, .Nk = p.k, .Hq = p.H, .Hk = p.H, .D = p.D};
    rows.add(c);
    for (Alignment alignment : {Alignment::bottom_right, Alignment::top_left}) {
      Case causal = c;
      causal.name += alignment == Alignment::top_left ? "_top_left" : "_causal";
      causal.options = {.causal = true, .alignment = alignment};
      rows.add(causal);
    }
  }
  // Large scores at lengths with a partial tile of keys: other implementations return NaN in dQ.
  for (std::int64_t n : {1, 2, 5, 17, 128})
    rows.add({.name = join("overflow", n), .Nq = n, .Nk = n, .D = 64, .options = {.scale = 15.0 / 8}});
}

void packed(Rows& rows) {
  const Case base{.name = "", .Hq = 2, .Hk = 1, .D = 32};
  const auto add = [&](const char* name, std::vector<std::int32_t> q, std::vector<std::int32_t> k, bool causal,
                       std::int64_t tail_q = 0, std::int64_t tail_k = 0) {
    Case c = base;
    c.name = name, c.packed_q = std::move(q), c.packed_k = std::move(k), c.options.causal = causal;
    c.tail_q = tail_q, c.tail_k = tail_k;
    rows.add_in_each_type(c);
  };
  add("packed_zero_lengths", {0, 5, 0, 130, 0}, {0, 200, 7, 65, 0}, true);
  add("packed_all_zero", {0, 0, 0}, {0, 0, 0}, false);
  add("packed_all_zero_with_tail", {0, 0, 0}, {0, 0, 0}, false, 9, 4);
  add("packed_no_keys", {3, 70, 1}, {0, 0, 0}, false);
  add("packed_no_queries", {0, 0, 0}, {3, 200, 1}, false);
  add("packed_more_sequences_than_tokens", {1, 0, 0, 1, 0, 0, 0, 1}, {0, 1, 0, 1, 0, 0, 1, 1}, true);
  add("packed_tail", {70, 20}, {100, 200}, true, 65, 193);
  add("packed_one_key_each", {76, 34, 146}, {1, 1, 1}, true);
  add("packed_one_query_some_none", {1, 0, 1, 1}, {50, 60, 0, 193}, true);
  // Rows before the first sequence, more and fewer than any kernel's tile has; gaps by seqused; padding only.
  const auto add_front = [&](const char* name, std::int64_t front_q, std::int64_t front_k, std::vector<std::int32_t> q,
                             std::vector<std::int32_t> k, auto change) {
    Case c = base;
    c.name = name, c.front_q = front_q, c.front_k = front_k, c.packed_q = std::move(q), c.packed_k = std::move(k);
    change(c);
    rows.add_in_each_type(c);
  };
  add_front("front", 130, 200, {150, 20}, {150, 90}, [](Case& c) { c.D = 64; });
  add_front("front_of_one", 1, 1, {66}, {194}, [](Case& c) { c.options.causal = true; });
  add_front("front_of_queries", 300, 0, {5, 70}, {70, 5}, [](Case& c) { c.tail_q = 2; });
  add_front("front_of_keys", 0, 300, {5, 70}, {70, 5}, [](Case& c) { c.tail_k = 2; });
  add_front("front_and_gaps", 140, 260, {70, 30, 66}, {66, 200, 30}, [](Case& c) {
    c.options.causal = true, c.bias = c.mask = true, c.used_q = {3, 0, 66}, c.used_k = {66, 77, 0};
    c.tail_q = 150, c.tail_k = 3;
  });
  add_front("front_everything", 200, 131, {66, 0, 17, 130}, {194, 30, 0, 100}, [](Case& c) {
    c.bias = c.mask = c.dlse = true, c.slopes = Slopes::per_batch_head, c.sinks = Sinks::finite;
    c.options = {.softcap = 5, .causal = true, .window_left = 60, .dropout = 0.25, .seed = 3, .accumulate = true};
    c.f32_grads = true;
  });
  add_front("front_of_nothing", 150, 140, {0, 0, 0}, {0, 0, 0}, [](Case&) {});
  add_front("front_last_token", 200, 299, {0, 0, 1}, {0, 0, 1}, [](Case& c) { c.sinks = Sinks::finite; });
  add_front("front_last_sequence", 0, 0, {0, 0, 0, 70}, {0, 0, 0, 200}, [](Case& c) { c.front_q = c.front_k = 513; });
  Case many = base;
  many.name = "packed_300_sequences", many.D = 8;
  for (std::int32_t b = 0; b < 300; ++b) many.packed_q.push_back(b % 3), many.packed_k.push_back((b + 1) % 4);
  rows.add(many);
}

void empty(Rows& rows) {
  rows.add({.name = "no_batch", .B = 0, .Nq = 5, .Nk = 7, .D = 16});
  rows.add({.name = "no_queries", .B = 2, .Nq = 0, .Nk = 70, .D = 16});
  rows.add({.name = "no_queries_bias_sinks",
            .B = 2,
            .Nq = 0,
            .Nk = 70,
            .D = 16,
            .bias = true,
            .bias_dims = {.i = false},
            .sinks = Sinks::finite});
  rows.add({.name = "no_keys", .B = 2, .Nq = 70, .Nk = 0, .D = 16, .dlse = true});
  rows.add({.name = "no_keys_sinks", .B = 2, .Nq = 70, .Nk = 0, .D = 16, .sinks = Sinks::some_infinite, .dlse = true});
  rows.add(
      {.name = "seqused_zero", .B = 3, .Nq = 70, .Nk = 200, .D = 16, .used_q = {70, 0, 5}, .used_k = {0, 200, 65}});
  rows.add({.name = "seqused_everything_zero", .B = 2, .Nq = 9, .Nk = 9, .D = 16, .used_q = {0, 0}, .used_k = {0, 0}});
  const auto add = [&](const char* name, auto change) {
    Case c{.name = name, .B = 2, .Nq = 70, .Nk = 70, .D = 16, .bias = true, .sinks = Sinks::finite};
    c.bias_dims = {.b = false, .h = false, .i = false, .j = false};
    change(c);
    rows.add_in_each_type(c);
  };
  add("no_heads", [](Case& c) { c.Hq = c.Hk = 0; });
  add("no_query_heads", [](Case& c) { c.Hq = 0; });
  add("no_heads_packed", [](Case& c) { c.Hq = c.Hk = 0, c.packed_q = {3, 70}, c.packed_k = {200, 1}; });
  add("no_query_heads_packed", [](Case& c) { c.Hq = 0, c.packed_q = {3, 70}, c.packed_k = {200, 1}; });
  add("no_query_heads_accumulate", [](Case& c) { c.Hq = 0, c.options.accumulate = c.f32_grads = true; });
  add("no_tokens", [](Case& c) { c.Nq = c.Nk = 0; });
  add("no_tokens_in_70000_sequences", [](Case& c) { c.B = 70000, c.Nq = c.Nk = 0; });
  add("no_keys_in_many_sequences", [](Case& c) { c.B = 300, c.Nq = 1, c.Nk = 0; });
  add("no_batch_with_sinks", [](Case& c) { c.B = 0; });
  add("nothing_of_the_widest_heads", [](Case& c) { c.Nq = 0, c.D = 576, c.Dv = 512; });
  add("nothing_of_the_narrowest_heads", [](Case& c) { c.Nk = 0, c.D = 1; });
}

// Numbers at the ends of their ranges (docs/algorithm.md, "Limits"), as far as every kernel for all options counts.
void limits(Rows& rows) {
  constexpr std::int64_t far = std::int64_t{1} << 48;
  const auto place = [&](const char* name, Options options, auto change) {
    Case c{.name = name, .B = 2, .Nq = 70, .Nk = 210, .D = 16};
    c.options = options;
    change(c);
    rows.add_in_each_type(c);
  };
  const auto nothing = [](Case&) {};
  place("furthest_positions",
        {.causal = true, .dropout = 0.3, .seed = 5, .row0 = far, .col0 = far, .head0 = far, .batch0 = far}, nothing);
  place("furthest_positions_below_zero",
        {.causal = true, .dropout = 0.3, .seed = 5, .row0 = -far, .col0 = -far, .head0 = -far, .batch0 = -far},
        nothing);
  place("furthest_apart", {.causal = true, .row0 = -far, .col0 = far}, nothing);
  place("furthest_diagonal",
        {.causal = true,
         .alignment = Alignment::offset,
         .diagonal_offset = far,
         .window_left = 20,
         .row0 = -far,
         .col0 = -3},
        [](Case& c) { c.slopes = Slopes::per_head; });
  for (const std::int64_t tokens : {std::int64_t{1} << 29, std::int64_t{1} << 34}) {
    const bool most = tokens > std::int64_t{1} << 29;
    const auto add = [&](const std::string& name, Options options, auto change) {
      Case c{.name = name + (most ? "_most" : "_many"), .B = 2, .Nq = 70, .Nk = 400, .D = 16, .used_k = {400, 65}};
      c.options = options, c.endless_k = tokens, c.grads.dk = c.grads.dv = c.grads.dbias = false;
      change(c);
      rows.add_in_each_type(c);
    };
    add("endless_keys", {}, nothing);
    add("endless_keys_causal", {.causal = true}, [](Case& c) { c.Hq = 4, c.slopes = Slopes::per_head; });
    add("endless_keys_one_query", {}, [](Case& c) { c.Nq = 1, c.used_k = {400, 0}; });
    add("endless_keys_bias_mask", {}, [](Case& c) { c.bias = c.mask = true; });
    add("endless_keys_dropout", {.dropout = 0.4, .seed = 3}, [](Case& c) { c.sinks = Sinks::finite; });
    add("endless_keys_packed", {.causal = true}, [](Case& c) {
      c.used_k = {}, c.packed_q = {3, 70, 0}, c.packed_k = {200, 1, 30};
    });
  }
}

void blind_rows(Rows& rows) {
  constexpr std::int64_t far = std::int64_t{1} << 40, all_of_it = std::numeric_limits<std::int64_t>::max();
  const Case base{.name = "", .B = 2, .Nq = 150, .Nk = 210, .D = 16, .dlse = true};
  const auto add = [&](const char* name, Options options, auto change) {
    Case c = base;
    c.name = name, c.options = options;
    change(c);
    rows.add_in_each_type(c);
  };
  const auto nothing = [](Case&) {};
  add("blind_first_rows", {.causal = true, .alignment = Alignment::offset, .diagonal_offset = -70}, nothing);
  add("blind_first_rows_sinks", {.causal = true, .alignment = Alignment::offset, .diagonal_offset = -70},
      [](Case& c) { c.sinks = Sinks::some_infinite; });
  add("blind_last_rows", {.alignment = Alignment::offset, .diagonal_offset = 100, .window_left = 5}, nothing);
  add("blind_first_key_tile", {.window_left = 3, .window_right = 3}, nothing);
  add("blind_all_rows", {.causal = true, .alignment = Alignment::offset, .diagonal_offset = -far}, nothing);
  add("diagonal_far_right", {.causal = true, .alignment = Alignment::offset, .diagonal_offset = far}, nothing);
  add("window_of_everything", {.window_left = all_of_it, .window_right = all_of_it}, nothing);
  add("window_zero", {.window_left = 0, .window_right = 0}, nothing);
  add("window_as_causal", {.window_right = 0}, nothing);
  add("unseen_keys", {.causal = true, .alignment = Alignment::top_left}, nothing);
  add("more_queries_than_keys", {.causal = true}, [](Case& c) { c.Nq = 210, c.Nk = 100; });
  add("bias_all_infinite", {}, [](Case& c) { c.bias = true, c.masked_bias = 1; });
  add("bias_nearly_all_infinite", {}, [](Case& c) { c.bias = true, c.masked_bias = 0.995; });
  add("bias_infinite_sinks", {}, [](Case& c) { c.bias = true, c.masked_bias = 1, c.sinks = Sinks::finite; });
  add("mask_of_nothing", {}, [](Case& c) { c.mask = true, c.mask_density = 0; });
  add("mask_nearly_empty", {}, [](Case& c) { c.mask = true, c.mask_density = 0.005; });
}

void numbers(Rows& rows) {
  for (std::int64_t Nk : {64, 200, 385})
    for (bool mask : {false, true})
      rows.add_in_each_type({.name = join(mask ? "cold_mask" : "cold", Nk),
                             .Nq = 70,
                             .Nk = Nk,
                             .D = 64,
                             .mask = mask,
                             .distribution = Distribution::cold});
  rows.add_in_each_type({.name = "cold_one_query", .Nq = 1, .Nk = 66, .D = 64, .distribution = Distribution::cold});
  rows.add_in_each_type({.name = "cold_causal",
                         .Nq = 130,
                         .Nk = 130,
                         .D = 128,
                         .options = {.causal = true},
                         .distribution = Distribution::cold});
  rows.add_in_each_type({.name = "huge", .Nq = 70, .Nk = 200, .D = 64, .distribution = Distribution::huge});
  rows.add_in_each_type({.name = "huge_causal",
                         .Nq = 130,
                         .Nk = 130,
                         .D = 64,
                         .options = {.causal = true},
                         .distribution = Distribution::huge});
  rows.add_in_each_type({.name = "huge_softcap",
                         .Nq = 70,
                         .Nk = 200,
                         .D = 64,
                         .options = {.softcap = 20},
                         .distribution = Distribution::huge});
  rows.add_in_each_type({.name = "outlier", .Nq = 130, .Nk = 400, .D = 64, .distribution = Distribution::outlier});
  rows.add_in_each_type({.name = "outlier_two_sequences",
                         .B = 2,
                         .Nq = 70,
                         .Nk = 70,
                         .D = 256,
                         .distribution = Distribution::outlier,
                         .style = Style::heads_first});
  rows.add_in_each_type({.name = "small", .Nq = 70, .Nk = 200, .D = 64, .distribution = Distribution::small});
  rows.add_in_each_type({.name = "structured",
                         .B = 2,
                         .Nq = 70,
                         .Nk = 200,
                         .Hq = 6,
                         .D = 40,
                         .Dv = 24,
                         .distribution = Distribution::structured,
                         .style = Style::mixed});
  for (double scale : {0.0, -0.25}) {
    rows.add_in_each_type(
        {.name = scale == 0 ? "scale_zero" : "scale_below_zero", .Nq = 70, .Nk = 200, .options = {.scale = scale}});
    rows.add_in_each_type({.name = scale == 0 ? "scale_zero_causal" : "scale_below_zero_causal",
                           .Nq = 70,
                           .Nk = 200,
                           .options = {.scale = scale, .causal = true}});
  }
  rows.add_in_each_type({.name = "dropout_of_most", .Nq = 70, .Nk = 200, .options = {.dropout = 0.98, .seed = 4}});
  rows.add_in_each_type(
      {.name = "dropout_rounds_to_none", .Nq = 70, .Nk = 70, .options = {.dropout = 1e-6, .seed = 4}});
}

// Every probability of a row is below f32's range: sinks that take all of it, and keys that ALiBi has pushed far away.
void underflow(Rows& rows) {
  const Case base{.name = "", .Nq = 70, .Nk = 70, .D = 40};
  const auto add = [&](const char* name, Options options, auto change) {
    Case c = base;
    c.name = name, c.options = options;
    change(c);
    rows.add_in_each_type(c);
  };
  add("underflow_sinks", {}, [](Case& c) { c.sinks = Sinks::high; });
  add("underflow_sinks_decode", {}, [](Case& c) { c.sinks = Sinks::high, c.Nq = 2, c.Nk = 300; });
  add("underflow_sinks_bias_dlse", {.causal = true}, [](Case& c) { c.sinks = Sinks::high, c.bias = c.dlse = true; });
  add("underflow_sinks_dropout", {.softcap = 3, .dropout = 0.3, .seed = 4}, [](Case& c) { c.sinks = Sinks::high; });
  for (const auto& [name, distance] : {std::pair{"underflow_alibi_some", 400}, {"underflow_alibi_all", 440}})
    add(name, {.col0 = distance}, [](Case& c) { c.slopes = Slopes::per_head, c.sinks = Sinks::finite; });
}

void heads(Rows& rows) {
  for (std::int64_t ratio : {1, 3, 5, 6, 7, 8, 9, 63})
    rows.add({.name = join("ratio", ratio),
              .Nq = 20,
              .Nk = 70,
              .Hq = 2 * ratio,
              .Hk = 2,
              .D = 16,
              .options = {.causal = true}});
  for (std::int64_t D : {1, 8, 40, 59, 64, 72, 80, 96, 111, 128, 160, 192, 224, 256, 512})
    rows.add_in_each_type({.name = join("dim", D),
                           .Nq = 67,
                           .Nk = 195,
                           .Hq = 1,
                           .Hk = 1,
                           .D = D,
                           .style = D % 3 == 0 ? Style::gaps : Style::contiguous});
  struct Pair {
    std::int64_t D, Dv;
  };
  for (const Pair& p : {Pair{192, 128}, {64, 256}, {576, 512}, {1, 512}, {576, 1}})
    rows.add_in_each_type(
        {.name = join("dims", p.D, p.Dv), .Nq = 67, .Nk = 195, .Hq = 2, .Hk = 1, .D = p.D, .Dv = p.Dv});
}

void layouts(Rows& rows) {
  const std::pair<const char*, Style> styles[] = {{"layout_gaps", Style::gaps},
                                                  {"layout_heads_first", Style::heads_first},
                                                  {"layout_shifted", Style::shifted},
                                                  {"layout_mixed", Style::mixed},
                                                  {"layout_broadcast", Style::broadcast}};
  for (const auto& [name, style] : styles) {
    Case c{.name = name, .B = 2, .Nq = 66, .Nk = 194, .Hq = 4, .Hk = 2, .D = 40, .Dv = 24, .options = {.causal = true}};
    c.bias = c.mask = c.dlse = true, c.style = style;
    rows.add_in_each_type(c);
    c.name += "_packed", c.packed_q = {66, 3}, c.packed_k = {194, 70}, c.tail_q = c.tail_k = 2;
    rows.add_in_each_type(c);
    // Every size is 1, and strides of such dimensions point out of bounds: nobody may read them.
    rows.add({.name = std::string(name) + "_ones",
              .B = 1,
              .Nq = 1,
              .Nk = 1,
              .Hq = 1,
              .Hk = 1,
              .D = 1,
              .bias = true,
              .style = style});
    rows.add({.name = std::string(name) + "_one_head",
              .B = 1,
              .Nq = 5,
              .Nk = 70,
              .Hq = 1,
              .Hk = 1,
              .D = 1,
              .mask = true,
              .mask_dims = {.b = false, .h = false, .i = false},
              .style = style});
  }
}

}  // namespace

std::vector<Case> corner() {
  Rows rows;
  lengths(rows);
  packed(rows);
  empty(rows);
  limits(rows);
  blind_rows(rows);
  numbers(rows);
  heads(rows);
  layouts(rows);
  underflow(rows);
  return rows.all;
}

}  // namespace tessera::cases
