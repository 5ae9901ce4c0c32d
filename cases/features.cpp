// SPDX-License-Identifier: Apache-2.0
// The table of options: each alone, then in combinations, in every type. Part of tessera_cases; see tables.hpp.
// Implements docs/numerics.md, "Suites"; the options are those of docs/algorithm.md.
#include "cases/tables.hpp"

namespace tessera::cases {

namespace {

// A shape with partial tiles in both dimensions, two sequences and grouped heads (GQA), on which every option has an
// effect.
Case plain(std::string name) {
  return {.name = std::move(name), .B = 2, .Nq = 70, .Nk = 210, .Hq = 4, .Hk = 2, .D = 32};
}

Case with(std::string name, Options options) {
  Case c = plain(std::move(name));
  c.options = options;
  return c;
}

template <class Change>
Case changed(std::string name, Options options, Change change) {
  Case c = with(std::move(name), options);
  change(c);
  return c;
}

std::vector<Case> visibility() {
  return {
      with("causal", {.causal = true}),
      with("causal_top_left", {.causal = true, .alignment = Alignment::top_left}),
      with("causal_offset", {.causal = true, .alignment = Alignment::offset, .diagonal_offset = 17}),
      with("window", {.window_left = 40, .window_right = 9}),
      with("window_left", {.window_left = 40}),
      with("window_right", {.window_right = 9}),
      with("window_causal", {.causal = true, .window_left = 25}),
      with("window_top_left", {.alignment = Alignment::top_left, .window_left = 3, .window_right = 60}),
      with("positions", {.causal = true, .alignment = Alignment::top_left, .row0 = 500, .col0 = 380}),
      changed("mask", {}, [](Case& c) { c.mask = true; }),
      changed("mask_per_head", {}, [](Case& c) { c.mask = true, c.mask_dims = {.b = false, .i = false}; }),
      changed("mask_rows", {}, [](Case& c) { c.mask = true, c.mask_dims = {.h = false, .j = false}; }),
      changed("mask_sparse", {}, [](Case& c) { c.mask = true, c.mask_density = 0.02; }),
      changed("seqused", {},
              [](Case& c) {
                c.used_q = {70, 33}, c.used_k = {201, 64};
              }),
      changed("seqused_causal", {.causal = true},
              [](Case& c) {
                c.used_k = {201, 64};
              }),
      changed("packed", {},
              [](Case& c) {
                c.packed_q = {70, 0, 66, 1}, c.packed_k = {210, 5, 0, 193};
              }),
      changed("packed_causal", {.causal = true},
              [](Case& c) {
                c.packed_q = {70, 66, 1}, c.packed_k = {210, 30, 193};
              }),
      changed("packed_seqused", {.causal = true},
              [](Case& c) {
                c.packed_q = {70, 66, 1}, c.packed_k = {210, 90, 193};
                c.used_q = {70, 60, 0}, c.used_k = {195, 90, 100};
              }),
      changed("packed_hints", {.max_seqlen_q = 70, .max_seqlen_k = 500},
              [](Case& c) {
                c.packed_q = {70, 66}, c.packed_k = {210, 90};
              }),
  };
}

std::vector<Case> scores() {
  return {
      with("scale", {.scale = 0.02}),
      with("scale_negative", {.scale = -0.2}),
      with("softcap", {.softcap = 1.5}),
      with("softcap_large", {.softcap = 50}),
      changed("alibi", {}, [](Case& c) { c.slopes = Slopes::per_head; }),
      changed("alibi_per_batch", {.causal = true}, [](Case& c) { c.slopes = Slopes::per_batch_head; }),
      changed("bias", {}, [](Case& c) { c.bias = true; }),
      changed("bias_f32", {}, [](Case& c) { c.bias = true, c.bias_f32 = true; }),
      changed("bias_of_batch", {}, [](Case& c) { c.bias = true, c.bias_dims = {.b = false}; }),
      changed("bias_of_heads", {}, [](Case& c) { c.bias = true, c.bias_dims = {.h = false}; }),
      changed("bias_of_queries", {}, [](Case& c) { c.bias = true, c.bias_dims = {.i = false}; }),
      changed("bias_of_keys", {}, [](Case& c) { c.bias = true, c.bias_dims = {.j = false}; }),
      changed("bias_of_plane", {}, [](Case& c) { c.bias = true, c.bias_dims = {.b = false, .h = false}; }),
      changed("bias_of_row", {}, [](Case& c) { c.bias = true, c.bias_dims = {.b = false, .h = false, .i = false}; }),
      changed("bias_scalar", {},
              [](Case& c) { c.bias = true, c.bias_dims = {.b = false, .h = false, .i = false, .j = false}; }),
      changed("bias_infinite", {}, [](Case& c) { c.bias = true, c.masked_bias = 0.4; }),
      with("dropout", {.dropout = 0.2, .seed = 77, .seed_offset = 5}),
      with("dropout_positions", {.dropout = 0.4, .seed = 77, .row0 = 33, .col0 = 101, .head0 = 5, .batch0 = 9}),
      changed("dropout_rng", {.dropout = 0.2, .seed = 77, .seed_offset = 5}, [](Case& c) { c.rng = true; }),
      changed("sinks", {}, [](Case& c) { c.sinks = Sinks::finite; }),
      changed("sinks_infinite", {}, [](Case& c) { c.sinks = Sinks::some_infinite; }),
      changed("dlse", {}, [](Case& c) { c.dlse = true; }),
      changed("dlse_sinks", {.causal = true}, [](Case& c) { c.dlse = true, c.sinks = Sinks::finite; }),
  };
}

std::vector<Case> outputs() {
  return {
      changed("no_lse", {}, [](Case& c) { c.no_lse = true; }),
      changed("f32_o", {}, [](Case& c) { c.f32_o = true; }),
      changed("f32_everything", {}, [](Case& c) { c.f32_o = c.f32_do = c.f32_grads = true; }),
      changed("accumulate", {.accumulate = true}, [](Case& c) { c.f32_grads = true; }),
      changed("accumulate_packed", {.accumulate = true},
              [](Case& c) {
                c.f32_grads = true, c.packed_q = {70, 3}, c.packed_k = {193, 9}, c.tail_q = c.tail_k = 5;
              }),
      changed("only_dq", {}, [](Case& c) { c.grads = {.dk = false, .dv = false}; }),
      changed("only_dk", {}, [](Case& c) { c.grads = {.dq = false, .dv = false}; }),
      changed("only_dv", {}, [](Case& c) { c.grads = {.dq = false, .dk = false}; }),
      changed("only_dbias", {}, [](Case& c) { c.bias = true, c.grads = {.dq = false, .dk = false, .dv = false}; }),
      changed("only_dsinks", {},
              [](Case& c) { c.sinks = Sinks::finite, c.grads = {.dq = false, .dk = false, .dv = false}; }),
      changed("value_narrower", {}, [](Case& c) { c.D = 48, c.Dv = 20; }),
      changed("value_wider", {}, [](Case& c) { c.D = 20, c.Dv = 70; }),
      changed("multi_query", {}, [](Case& c) { c.Hk = 1; }),
      changed("library_workspace", {.causal = true}, [](Case& c) { c.caller_workspace = false; }),
  };
}

std::vector<Case> company() {
  return {
      changed("softcap_alibi_causal", {.softcap = 2, .causal = true}, [](Case& c) { c.slopes = Slopes::per_head; }),
      changed("softcap_bias_dropout_sinks_dlse", {.softcap = 2, .dropout = 0.3, .seed = 3},
              [](Case& c) { c.bias = c.dlse = true, c.sinks = Sinks::finite; }),
      changed("mask_bias_window", {.window_left = 100, .window_right = 20}, [](Case& c) { c.bias = c.mask = true; }),
      changed("everything",
              {.scale = -0.3,
               .softcap = 3,
               .causal = true,
               .alignment = Alignment::offset,
               .diagonal_offset = 80,
               .window_left = 90,
               .dropout = 0.25,
               .seed = 11,
               .row0 = 7,
               .col0 = 5,
               .head0 = 2,
               .batch0 = 1},
              [](Case& c) {
                c.bias = c.mask = c.dlse = true, c.bias_dims = {.b = false, .i = false}, c.Dv = 24;
                c.slopes = Slopes::per_batch_head, c.sinks = Sinks::some_infinite, c.used_q = {70, 50},
                c.used_k = {180, 210};
              }),
      changed("everything_packed",
              {.softcap = 4,
               .causal = true,
               .window_left = 150,
               .window_right = 3,
               .dropout = 0.1,
               .seed = 12,
               .accumulate = true},
              [](Case& c) {
                c.packed_q = {66, 0, 17, 130}, c.packed_k = {194, 30, 0, 100}, c.tail_q = 3, c.tail_k = 9;
                c.bias = c.mask = c.dlse = c.rng = c.f32_o = c.f32_grads = true, c.bias_dims = {.h = false};
                c.slopes = Slopes::per_head, c.sinks = Sinks::finite, c.style = Style::mixed;
              }),
  };
}

}  // namespace

std::vector<Case> features() {
  std::vector<Case> rows;
  for (const auto& part : {visibility(), scores(), outputs(), company()})
    rows.insert(rows.end(), part.begin(), part.end());
  return in_types(rows, {Type::f32, Type::f16, Type::bf16});
}

}  // namespace tessera::cases
