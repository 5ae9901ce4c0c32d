// SPDX-License-Identifier: Apache-2.0
// The table of caches: K and V in 8 bits or in another type than Q's, with every form of scales; scores of q and qv;
// trees. Few queries (decoding) and many, whole vectors and parts of them. Part of tessera_cases; see tables.hpp.
// Implements docs/algorithm.md, "Types and scales of keys and values" and equation (1).
#include "cases/tables.hpp"

namespace tessera::cases {

namespace {

Case decoding(std::string name) {
  return {.name = std::move(name), .B = 2, .Nq = 1, .Nk = 610, .Hq = 8, .Hk = 2, .D = 64, .backward = false};
}

Case many_queries(std::string name) {
  return {.name = std::move(name), .B = 2, .Nq = 70, .Nk = 210, .Hq = 4, .Hk = 2, .D = 48, .backward = false};
}

// With and without whole vectors, with few queries and with many.
void add_types(std::vector<Case>& rows, const std::string& name, const Cached& k, const Cached& v) {
  for (Case c : {decoding(name + "_decoding"), many_queries(name)}) {
    c.cached_k = k, c.cached_v = v;
    rows.push_back(c);
    c.name += "_odd", c.D = 37, c.Dv = 27, c.Nq += 2, c.style = Style::mixed, c.options.causal = true;
    rows.push_back(c);
  }
}

std::vector<Case> types() {
  std::vector<Case> rows;
  for (Type type : {Type::e4m3, Type::i8})
    for (Scales scales : {Scales::one, Scales::per_head, Scales::per_sequence, Scales::per_key}) {
      constexpr const char* names[] = {"", "one", "head", "sequence", "key"};
      const std::string name = std::string(name_of(type)) + "_per_" + names[static_cast<std::size_t>(scales)];
      add_types(rows, name, {type, scales}, {type, scales});
    }
  add_types(rows, "e4m3_plain", {.type = Type::e4m3}, {.type = Type::e4m3});
  add_types(rows, "k_e4m3_v_i8", {Type::e4m3, Scales::per_key}, {Type::i8, Scales::per_head});
  add_types(rows, "k_i8_v_same", {Type::i8, Scales::one}, {});
  add_types(rows, "k_same_v_e4m3", {}, {.type = Type::e4m3});
  add_types(rows, "k_bf16_v_f16", {.type = Type::bf16}, {.type = Type::f16});
  // More dims than one group has, whole vectors or not; and groups beside other forms.
  for (Type type : {Type::e4m3, Type::i8})
    for (const auto& [D, Dv] : {std::pair<std::int64_t, std::int64_t>{256, 160}, {130, 300}, {64, 27}, {576, 512}})
      for (Case c : {decoding("_decoding"), many_queries("")}) {
        c.name = std::string(name_of(type)) + "_per_128_of_" + std::to_string(D) + c.name;
        c.D = D, c.Dv = Dv, c.Nk = 130, c.cached_k = c.cached_v = {type, Scales::per_group};
        rows.push_back(c);
      }
  for (Case c : {decoding("groups_beside_keys_decoding"), many_queries("groups_beside_keys")}) {
    c.D = 200, c.Dv = 256, c.Nk = 130, c.qv = true, c.style = Style::mixed;
    c.cached_k = {Type::bf16, Scales::per_key}, c.cached_v = {Type::e4m3, Scales::per_group};
    rows.push_back(c);
    c.name += "_packed", c.packed_q = {3, 0, 70}, c.packed_k = {130, 5, 93}, c.style = Style::broadcast;
    c.cached_k = {Type::f16, Scales::per_group}, c.cached_v = {Type::i8, Scales::per_group};
    rows.push_back(c);
  }
  add_types(rows, "k_f32_scaled_v_f32", {Type::f32, Scales::per_key}, {Type::f32, Scales::per_sequence});
  return rows;
}

// Scales of any size: 0, subnormal, far from 1. Alone, so that no other head or sequence is larger.
std::vector<Case> sizes() {
  std::vector<Case> rows;
  constexpr std::pair<const char*, double> all[] = {
      {"zero", 0}, {"subnormal", 0x1p-140}, {"tiny", 0x1p-60}, {"large", 0x1p60}};
  for (const auto& [name, size] : all)
    for (Type type : {Type::e4m3, Type::i8})
      for (bool decode : {true, false}) {
        const std::string full = std::string(name) + "_scales_" + name_of(type) + (decode ? "_decoding" : "");
        Case c = decode ? decoding(full) : many_queries(full);
        c.B = 1, c.Hk = 1, c.Hq = 3;
        c.cached_k = {type, Scales::per_key, size == 0x1p60 ? 1 : size};  // scores of 2^60 have one winner
        c.cached_v = {type, Scales::per_key, size};
        rows.push_back(c);
        c.name += "_keys", c.cached_k.size = size, c.cached_v.size = 1;
        rows.push_back(c);
      }
  return rows;
}

std::vector<Case> company() {
  const Cached e4m3{Type::e4m3, Scales::per_key}, i8{Type::i8, Scales::per_head};
  std::vector<Case> rows;
  for (Case c : {decoding("_decoding"), many_queries("")}) {
    const std::string suffix = c.name;
    const auto add = [&](const char* name, auto change) {
      Case row = c;
      row.name = name + suffix, row.cached_k = e4m3, row.cached_v = i8;
      change(row);
      rows.push_back(row);
    };
    add("cache_packed", [](Case& x) {
      x.packed_q = {static_cast<std::int32_t>(x.Nq), 0, 3, 2}, x.packed_k = {210, 5, 0, 193}, x.front_k = 7,
      x.tail_k = 9, x.style = Style::gaps;
    });
    add("cache_seqused", [](Case& x) { x.used_k = {193, 64}, x.options.causal = true; });
    add("cache_window_softcap", [](Case& x) { x.options.window_left = 100, x.options.softcap = 3; });
    add("cache_alibi_sinks", [](Case& x) { x.slopes = Slopes::per_batch_head, x.sinks = Sinks::finite; });
    add("cache_bias_mask_dropout", [](Case& x) { x.bias = x.mask = true, x.options.dropout = 0.2; });
    add("cache_group_of_7", [](Case& x) { x.Hq = 14, x.D = 96, x.Dv = 64; });
    add("cache_group_of_17", [](Case& x) { x.Hq = 17, x.Hk = 1, x.Nq += 1; });
    add("cache_576_512", [](Case& x) { x.B = 1, x.Hq = 2, x.Hk = 1, x.Nk = 70, x.D = 576, x.Dv = 512; });
    add("cache_broadcast", [](Case& x) { x.style = Style::broadcast; });
    add("cache_nothing_seen", [](Case& x) { x.mask = true, x.mask_density = 0; });
    add("cache_no_keys", [](Case& x) { x.Nk = 0; });
  }
  return rows;
}

// A key is k and v together: q.k + qv.v.
std::vector<Case> second_products() {
  std::vector<Case> rows;
  for (Case c : {decoding("qv_decoding"), many_queries("qv")}) {
    c.qv = true, c.D = 16, c.Dv = 64;
    const auto add = [&](const char* name, auto change) {
      Case row = c;
      row.name += name;
      change(row);
      rows.push_back(row);
    };
    add("", [](Case&) {});
    add("_causal_softcap", [](Case& x) { x.options.causal = true, x.options.softcap = 2, x.options.window_left = 99; });
    add("_odd", [](Case& x) { x.D = 5, x.Dv = 27, x.style = Style::mixed; });
    add("_packed", [](Case& x) { x.packed_q = {3, 0, 70}, x.packed_k = {210, 5, 193}, x.style = Style::gaps; });
    add("_e4m3", [](Case& x) { x.cached_k = {.type = Type::e4m3}, x.cached_v = {Type::e4m3, Scales::per_key}; });
    add("_i8", [](Case& x) { x.cached_k = {Type::bf16}, x.cached_v = {Type::i8, Scales::per_head}; });
    add("_mla", [](Case& x) { x.B = 1, x.Hq = 16, x.Hk = 1, x.Nk = 130, x.D = 64, x.Dv = 512; });
    add("_scale", [](Case& x) { x.options.scale = -0.2, x.slopes = Slopes::per_head, x.sinks = Sinks::finite; });
  }
  return rows;
}

// Few queries and many, also more than a word of the tree holds and than there are keys.
std::vector<Case> trees() {
  std::vector<Case> rows;
  constexpr std::pair<const char*, Tree> all[] = {
      {"chain", Tree::chain}, {"star", Tree::star}, {"random", Tree::random}, {"blind", Tree::blind}};
  for (const auto& [name, tree] : all)
    for (const std::int64_t queries : {1, 7, 8, 9, 33, 70}) {
      Case c = queries > 8 ? many_queries("tree_") : decoding("tree_");
      c.name += name + std::string("_") + std::to_string(queries), c.Nq = queries, c.tree = tree;
      rows.push_back(c);
      c.name += "_window", c.positions = c.options.causal = true, c.options.window_left = 20;
      rows.push_back(c);
      c.name += "_alibi", c.slopes = Slopes::per_batch_head, c.options.window_right = 2, c.used_k = {90, 5};
      rows.push_back(c);
    }
  for (Case c : {decoding("positions_decoding"), many_queries("positions")}) {
    c.Nq += 5, c.positions = c.options.causal = true, c.slopes = Slopes::per_head;
    rows.push_back(c);
    c.name += "_packed", c.packed_q = {70, 0, 4}, c.packed_k = {210, 5, 3}, c.tree = Tree::random;
    c.options.row0 = 5, c.options.col0 = 3, c.style = Style::gaps;
    rows.push_back(c);
    c.name += "_top_left", c.options.alignment = Alignment::top_left, c.positions = false, c.mask = true;
    rows.push_back(c);
  }
  return rows;
}

}  // namespace

std::vector<Case> caches() {
  constexpr Type query_types[] = {Type::f32, Type::f16, Type::bf16};
  std::vector<Case> rows;
  // In turns: every way has every type of queries somewhere.
  for (const auto& part : {types(), sizes(), trees()})
    for (const Case& row : part)
      for (const Case& typed : in_types({row}, {query_types[rows.size() % 3]})) rows.push_back(typed);
  for (const auto& part : {company(), second_products()})
    for (const Case& row : in_types(part, {Type::f32, Type::f16, Type::bf16})) rows.push_back(row);
  for (std::size_t n = 0; n < rows.size(); ++n) rows[n].seed = n + 1;
  return rows;
}

}  // namespace tessera::cases
