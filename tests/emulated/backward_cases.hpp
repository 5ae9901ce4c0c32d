// SPDX-License-Identifier: Apache-2.0
// What the Hopper backward kernels' text is run on without a GPU: small cases, in groups. Included by the test that
// runs them (tests/sm90/sm90_backward_test.cpp) and by the program that asks the planner for their tiles
// (tiles_main.cpp).
#pragma once

#include <utility>
#include <vector>

#include "cases/case.hpp"

namespace tessera::emulated {

struct BackwardCase {
  cases::Case spec;     // its name is that of its group
  bool poison = false;  // what queries that see nothing hold must not matter, and is NaN
};

struct BackwardCases {
  std::vector<BackwardCase> all;

  // In bf16 and with heads that share one of K and V, unless the case says otherwise.
  void add(cases::Case c, bool poison = false) {
    if (c.type == Type::f32) c.type = Type::bf16;
    if (c.Hq <= 2) c.Hk = 1;
    c.seed = all.size() + 1;
    all.push_back({std::move(c), poison});
  }
};

inline void add_shapes(BackwardCases& c) {
  c.add({.name = "Full", .Nq = 130, .Nk = 250, .D = 64});
  c.add({.name = "Full", .Nq = 200, .Nk = 150, .D = 128});
  c.add({.name = "Full", .Nq = 130, .Nk = 110, .D = 192, .Dv = 128});
  c.add({.name = "Full", .Nq = 150, .Nk = 100, .Hq = 1, .D = 192});
  c.add({.name = "Full", .Nq = 140, .Nk = 150, .D = 256});
  c.add({.name = "Full", .Nq = 65, .Nk = 200, .Hq = 1, .D = 64, .type = Type::f16});
  c.add({.name = "Full", .Nq = 65, .Nk = 100, .Hq = 1, .D = 128, .type = Type::f16});
  c.add({.name = "Full", .Nq = 65, .Nk = 100, .Hq = 1, .D = 256, .type = Type::f16});

  for (const std::int64_t N : {1, 63, 64, 65, 112, 113, 193}) {
    c.add({.name = "OneToManyTiles", .Nq = 3, .Nk = N, .Hq = 1, .Hk = 1});
    c.add({.name = "OneToManyTiles", .Nq = N, .Nk = 3, .Hq = 1, .Hk = 1});
  }
  c.add({.name = "OneToManyTiles", .Nq = 3, .Nk = 500, .Hq = 1, .Hk = 1});
  c.add({.name = "OneToManyTiles", .Nq = 500, .Nk = 3, .Hq = 1, .Hk = 1});
  c.add({.name = "OneToManyTiles", .Nq = 460, .Nk = 30, .Hq = 1, .Hk = 1, .D = 128});
  c.add({.name = "OneToManyTiles", .Nq = 30, .Nk = 460, .Hq = 1, .Hk = 1, .D = 128});
  for (const std::int64_t Nq : {1, 64, 65, 200, 330})
    c.add({.name = "OneToManyTiles", .Nq = Nq, .Nk = 30, .Hq = 1, .Hk = 1, .D = 256});

  c.add({.name = "HeadDimsBetweenTiles", .Nq = 70, .Nk = 100, .D = 40, .Dv = 24});
  c.add({.name = "HeadDimsBetweenTiles", .Nq = 70, .Nk = 100, .D = 80, .Dv = 72, .options = {.causal = true}});
  c.add({.name = "HeadDimsBetweenTiles", .Nq = 70, .Nk = 100, .D = 64, .Dv = 128});
  c.add({.name = "HeadDimsBetweenTiles", .Nq = 70, .Nk = 70, .Hq = 1, .D = 136, .Dv = 8});
  c.add({.name = "HeadDimsBetweenTiles", .Nq = 70, .Nk = 70, .Hq = 1, .D = 160, .Dv = 144});
  c.add({.name = "HeadDimsBetweenTiles", .Nq = 70, .Nk = 70, .Hq = 1, .D = 72, .Dv = 248});

  c.add({.name = "GroupsOfHeads", .B = 2, .Nq = 70, .Nk = 140, .Hq = 6, .Hk = 2, .options = {.causal = true}});
  c.add({.name = "GroupsOfHeads", .B = 2, .Nq = 140, .Nk = 70, .Hq = 3, .Hk = 1, .D = 128});
  c.add({.name = "GroupsOfHeads", .B = 2, .Nq = 70, .Nk = 70, .Hq = 3, .Hk = 3, .D = 128});
  c.add({.name = "GroupsOfHeads", .Nq = 70, .Nk = 70, .Hq = 6, .Hk = 2, .D = 256, .options = {.causal = true}});

  c.add({.name = "Causal", .Nq = 300, .Nk = 300, .D = 64, .options = {.causal = true}});
  c.add({.name = "Causal", .Nq = 150, .Nk = 230, .D = 128, .options = {.causal = true}});
  c.add({.name = "Causal",
         .Nq = 140,
         .Nk = 300,
         .D = 128,
         .options = {.causal = true, .alignment = Alignment::top_left}});
  c.add({.name = "Causal", .Nq = 150, .Nk = 200, .Hq = 1, .D = 192, .options = {.causal = true}});
  c.add({.name = "Causal", .Nq = 250, .Nk = 230, .D = 192, .Dv = 128, .options = {.causal = true}});
  c.add({.name = "Causal", .Nq = 200, .Nk = 150, .Hq = 1, .D = 256, .options = {.causal = true}});

  for (const bool poison : {false, true}) {
    c.add({.name = "QueriesThatSeeNothing", .Nq = 300, .Nk = 100, .D = 128, .options = {.causal = true}}, poison);
    c.add({.name = "QueriesThatSeeNothing", .Nq = 300, .Nk = 40, .D = 64, .options = {.causal = true}}, poison);
    c.add({.name = "QueriesThatSeeNothing", .Nq = 100, .Nk = 20, .D = 256, .options = {.causal = true}}, poison);
  }

  c.add({.name = "Windows", .Nq = 300, .Nk = 300, .D = 64, .options = {.window_left = 100, .window_right = 20}});
  c.add({.name = "Windows", .Nq = 450, .Nk = 600, .D = 64, .options = {.causal = true, .window_left = 10}});
  c.add({.name = "Windows", .Nq = 130, .Nk = 400, .D = 128, .options = {.window_left = 0, .window_right = 0}});
  c.add({.name = "Windows", .Nq = 200, .Nk = 250, .Hq = 1, .D = 256, .options = {.window_left = 5}});
  c.add(
      {.name = "Windows", .Nq = 250, .Nk = 250, .D = 192, .Dv = 128, .options = {.window_left = 0, .window_right = 0}});
}

inline void add_lengths(BackwardCases& c) {
  for (const std::int64_t D : {64, 128, 256})
    for (const bool causal : {false, true}) {
      if (D == 256 && !causal) continue;
      c.add({.name = "PackedSequences",
             .D = D,
             .options = {.causal = causal},
             .packed_q = {70, 0, 160, 70, 10},
             .packed_k = {130, 10, 160, 120, 0},
             .tail_q = 5,
             .tail_k = 9});
    }

  for (const std::int64_t D : {64, 128, 256}) {
    c.add({.name = "Fronts", .D = D, .packed_q = {256}, .packed_k = {256}, .front_q = 128, .front_k = 128});
    c.add({.name = "Fronts",
           .D = D,
           .options = {.causal = true},
           .packed_q = {70, 0, 160},
           .packed_k = {130, 10, 160},
           .front_q = 200,
           .front_k = 300,
           .tail_q = 5,
           .tail_k = 9});
    c.add({.name = "Fronts",
           .D = D,
           .packed_q = {0, 0, 5},
           .packed_k = {0, 0, 5},
           .front_q = 1,
           .front_k = 400,
           .used_k = {0, 0, 3}});
  }

  // With NaN behind the used lengths, in memory that belongs to the tensors.
  c.add({.name = "UsedLengths",
         .B = 3,
         .Nq = 150,
         .Nk = 260,
         .D = 64,
         .used_q = {150, 20, 64},
         .used_k = {100, 260, 129}});
  for (const std::int64_t D : {128, 256})
    c.add({.name = "UsedLengths",
           .D = D,
           .options = {.causal = true},
           .packed_q = {70, 160, 70},
           .packed_k = {130, 170, 120},
           .used_q = {0, 130, 65},
           .used_k = {100, 3, 119}});

  for (const cases::Style style : {cases::Style::heads_first, cases::Style::broadcast})
    for (const std::int64_t D : {64, 128})
      c.add({.name = "Layouts",
             .B = 2,
             .Nq = 130,
             .Nk = 100,
             .Hq = 4,
             .Hk = 2,
             .D = D,
             .options = {.causal = true},
             .style = style});
}

inline void add_gradients(BackwardCases& c) {
  c.add({.name = "SinksAndLseGradient", .Nq = 64, .Nk = 200, .D = 128, .sinks = cases::Sinks::finite, .dlse = true});
  c.add({.name = "SinksAndLseGradient",
         .Nq = 200,
         .Nk = 100,
         .D = 64,
         .options = {.causal = true},
         .sinks = cases::Sinks::some_infinite});

  // A sequence without keys whose queries see the sink.
  c.add({.name = "SinksAndLseGradient",
         .D = 64,
         .packed_q = {40, 30, 60},
         .packed_k = {0, 200, 6},
         .sinks = cases::Sinks::finite});

  c.add({.name = "WideGradients", .B = 2, .Nq = 130, .Nk = 150, .D = 64, .used_q = {130, 70}, .f32_grads = true});
  c.add({.name = "WideGradients", .Nq = 70, .Nk = 100, .D = 104, .Dv = 88, .f32_grads = true});
  c.add({.name = "WideGradients", .Nq = 70, .Nk = 70, .Hq = 1, .D = 200, .Dv = 216, .f32_grads = true});

  c.add({.name = "Accumulation", .Nq = 100, .Nk = 130, .D = 64, .options = {.accumulate = true}, .f32_grads = true});
  c.add({.name = "Accumulation",
         .Nq = 200,
         .Nk = 100,
         .D = 120,
         .options = {.causal = true, .accumulate = true},
         .f32_grads = true});
  c.add({.name = "Accumulation",
         .B = 2,
         .Nq = 70,
         .Nk = 100,
         .options = {.accumulate = true},
         .used_q = {10, 70},
         .used_k = {100, 0},
         .f32_grads = true});

  for (const std::int64_t D : {64, 128, 256}) {
    c.add({.name = "SomeGradients", .Nq = 70, .Nk = 140, .D = D, .grads = {.dk = false, .dv = false}});
    c.add({.name = "SomeGradients", .Nq = 140, .Nk = 70, .D = D, .grads = {.dq = false, .dv = false}});
    c.add({.name = "SomeGradients", .Nq = 140, .Nk = 70, .D = D, .grads = {.dq = false, .dk = false}});
  }

  for (const auto distribution : {cases::Distribution::cold, cases::Distribution::outlier, cases::Distribution::huge})
    for (const Type type : {Type::bf16, Type::f16})
      c.add({.name = "ExtremeNumbers", .Nq = 70, .Nk = 200, .D = 64, .type = type, .distribution = distribution});
}

// Each option on a tile of one warpgroup's own rows or on a pair's; all of them together on every tile.
inline void add_options(BackwardCases& c) {
  for (const double scale : {-0.2, 0.0})
    c.add({.name = "ScaleNotPositive", .Nq = 70, .Nk = 150, .options = {.scale = scale, .causal = true}});

  c.add({.name = "Softcap", .Nq = 100, .Nk = 130, .D = 128, .options = {.softcap = 2, .causal = true}});
  c.add({.name = "Softcap", .Nq = 100, .Nk = 70, .Hq = 1, .D = 256, .options = {.softcap = 1, .causal = true}}, true);
  c.add({.name = "Softcap", .Nq = 130, .Nk = 60, .options = {.softcap = 3, .causal = true}}, true);

  c.add({.name = "Alibi", .Nq = 70, .Nk = 150, .slopes = cases::Slopes::per_head});
  c.add({.name = "Alibi",
         .D = 256,
         .options = {.alignment = Alignment::offset, .diagonal_offset = 30, .row0 = 5},
         .packed_q = {70, 0, 20},
         .packed_k = {65, 10, 70},
         .slopes = cases::Slopes::per_batch_head});

  const cases::Dims whole{}, of_heads_and_keys{.b = false, .i = false}, of_queries{.b = false, .h = false, .j = false};
  for (const cases::Dims& dims : {whole, of_heads_and_keys, of_queries}) {
    c.add({.name = "Bias", .B = 2, .Nq = 70, .Nk = 100, .bias = true, .bias_dims = dims});
    c.add({.name = "Mask", .B = 2, .Nq = 70, .Nk = 100, .mask = true, .mask_dims = dims});
  }
  c.add({.name = "Bias", .D = 192, .packed_q = {70, 20}, .packed_k = {65, 100}, .bias = true, .masked_bias = 0.9});
  c.add({.name = "Mask",
         .Nq = 100,
         .Nk = 70,
         .D = 128,
         .mask = true,
         .mask_density = 0.02,
         .sinks = cases::Sinks::finite,
         .grads = {.dq = false}});

  const Options positions{.dropout = 0.4, .seed = 77, .row0 = 33, .col0 = 101, .head0 = 5, .batch0 = 9};
  c.add({.name = "Dropout", .B = 2, .Nq = 70, .Nk = 150, .D = 128, .options = positions});
  c.add({.name = "Dropout", .Nq = 70, .Nk = 100, .D = 256, .options = positions});
  c.add({.name = "Dropout", .Nq = 100, .Nk = 130, .options = {.causal = true, .dropout = 0.9, .seed = 5}, .rng = true});

  const Options options{.scale = -0.3,
                        .softcap = 3,
                        .causal = true,
                        .window_left = 90,
                        .dropout = 0.25,
                        .seed = 11,
                        .row0 = 7,
                        .col0 = 5};
  cases::Case all{.name = "Everything", .B = 2, .Nq = 100, .Nk = 150, .D = 128, .options = options};
  all.used_q = {100, 50}, all.used_k = {130, 150}, all.dlse = true;
  all.bias = all.mask = true, all.slopes = cases::Slopes::per_batch_head, all.sinks = cases::Sinks::finite;
  c.add(all);
  all.type = Type::f16, all.bias_f32 = all.f32_grads = true, all.Hq = 1, all.D = 256;
  c.add(all);
  all.used_q.clear(), all.used_k.clear(), all.packed_q = {66, 0, 17, 30}, all.packed_k = {94, 30, 0, 60};
  all.D = 64, all.Hq = 6, all.Hk = 2;
  c.add(all);
}

inline std::vector<BackwardCase> backward_cases() {
  BackwardCases c;
  add_shapes(c), add_lengths(c), add_gradients(c), add_options(c);
  return c.all;
}

}  // namespace tessera::emulated
