// SPDX-License-Identifier: Apache-2.0
// What the Hopper forward kernel's text is run on without a GPU: small cases, in groups. Included by the test that runs
// them (tests/sm90/sm90_machine_test.cpp) and by the program that asks the planner for their tiles (tiles_main.cpp).
#pragma once

#include <utility>
#include <vector>

#include "cases/case.hpp"

namespace tessera::emulated {

struct EmulatedCase {
  cases::Case spec;   // its name is that of its group
  int grid = 0;       // blocks; 0: as planned
  double growth = 0;  // keys grow by this factor of their position: scores jump from tile to tile
};

struct EmulatedCases {
  std::vector<EmulatedCase> all;

  // In bf16 and with heads that share one of K and V, unless the case says otherwise.
  void add(cases::Case c, int grid = 0, double growth = 0) {
    if (c.type == Type::f32) c.type = Type::bf16;
    if (c.Hq <= 3) c.Hk = 1;
    c.backward = false, c.seed = all.size() + 1;
    all.push_back({std::move(c), grid, growth});
  }
};

inline void add_shapes(EmulatedCases& c) {
  c.add({.name = "Full", .Nq = 250, .Nk = 500, .D = 64});
  c.add({.name = "Full", .Nq = 129, .Nk = 400, .D = 128});
  c.add({.name = "Full", .Nq = 64, .Nk = 193, .D = 192, .Dv = 128});
  c.add({.name = "Full", .Nq = 70, .Nk = 90, .D = 192});
  c.add({.name = "Full", .Nq = 70, .Nk = 130, .D = 256});
  c.add({.name = "Full", .Nq = 65, .Nk = 300, .D = 64, .type = Type::f16});
  c.add({.name = "Full", .Nq = 65, .Nk = 200, .Hq = 1, .D = 192, .Dv = 128, .type = Type::f16});
  c.add({.name = "Full", .Nq = 65, .Nk = 200, .Hq = 1, .D = 256, .type = Type::f16});

  c.add({.name = "HeadDimsBetweenTiles", .Nq = 70, .Nk = 200, .D = 40});
  c.add({.name = "HeadDimsBetweenTiles", .Nq = 129, .Nk = 200, .D = 80, .Dv = 72, .options = {.causal = true}});
  c.add({.name = "HeadDimsBetweenTiles",
         .B = 2,
         .Nq = 100,
         .Nk = 300,
         .D = 96,
         .Dv = 104,
         .used_q = {70, 100},
         .used_k = {300, 131}});

  for (const std::int64_t Nk : {1, 63, 64, 65, 128, 129, 193, 257, 385})
    c.add({.name = "OneToManyTilesOfKeys", .Nq = 3, .Nk = Nk, .Hq = 1, .Hk = 1});

  c.add({.name = "Causal", .Nq = 300, .Nk = 300, .D = 64, .options = {.causal = true}});
  c.add({.name = "Causal", .Nq = 200, .Nk = 330, .D = 128, .options = {.causal = true}});
  c.add({.name = "Causal", .Nq = 130, .Nk = 130, .D = 256, .options = {.causal = true}});
  c.add(
      {.name = "Causal", .Nq = 140, .Nk = 400, .D = 128, .options = {.causal = true, .alignment = Alignment::top_left}},
      1);

  c.add({.name = "QueriesThatSeeNothing",
         .Nq = 400,
         .Nk = 130,
         .D = 128,
         .options = {.causal = true}});  // the first tiles see no key, one sees some
  c.add({.name = "QueriesThatSeeNothing", .Nq = 300, .Nk = 40, .D = 256, .options = {.causal = true}}, 1);
  c.add({.name = "QueriesThatSeeNothing", .Nq = 500, .Nk = 300, .D = 64, .options = {.causal = true}}, 1);

  c.add({.name = "Windows", .Nq = 300, .Nk = 300, .D = 64, .options = {.window_left = 100, .window_right = 20}});
  c.add({.name = "Windows", .Nq = 450, .Nk = 700, .D = 64, .options = {.causal = true, .window_left = 10}}, 1);
  c.add({.name = "Windows", .Nq = 130, .Nk = 600, .D = 128, .options = {.window_left = 0, .window_right = 0}}, 2);
  c.add({.name = "Windows", .Nq = 300, .Nk = 300, .Hq = 1, .D = 256, .options = {.window_left = 40, .window_right = 3}},
        1);

  for (const int grid : {1, 2, 5})
    c.add({.name = "BlocksThatTakeSeveralTiles", .B = 2, .Nq = 300, .Nk = 260, .D = 128, .options = {.causal = true}},
          grid);
  // Short sequences: descriptions of work come and go fast, and whole warpgroups have nothing to do.
  for (const int grid : {1, 2})
    c.add({.name = "BlocksThatTakeSeveralTiles", .B = 4, .Nq = 3, .Nk = 90, .Hq = 3, .D = 128, .used_q = {3, 1, 0, 2}},
          grid);
  c.add(
      {.name = "BlocksThatTakeSeveralTiles", .Hq = 4, .D = 64, .packed_q = {19, 64, 0, 38}, .packed_k = {73, 5, 9, 1}},
      2);
  c.add({.name = "BlocksThatTakeSeveralTiles", .B = 2, .Nq = 200, .Nk = 200, .Hq = 4, .Hk = 2, .D = 64}, 3);
  for (const int grid : {1, 2})
    c.add({.name = "BlocksThatTakeSeveralTiles",
           .B = 2,
           .Nq = 140,
           .Nk = 200,
           .Hq = 1,
           .D = 256,
           .options = {.causal = true}},
          grid);
}

inline void add_lengths(EmulatedCases& c) {
  for (const std::int64_t D : {64, 128, 256})
    for (const bool causal : {false, true}) {
      if (D == 256 && !causal) continue;
      c.add({.name = "PackedSequences",
             .D = D,
             .options = {.causal = causal},
             .packed_q = {70, 0, 160, 70},
             .packed_k = {130, 10, 160, 120}});
    }
  c.add({.name = "PackedSequences",
         .D = 256,
         .options = {.causal = true},
         .packed_q = {70, 0, 160, 70},
         .packed_k = {130, 0, 0, 290}},
        3);

  for (const std::int64_t D : {64, 128, 256}) {
    c.add({.name = "Fronts",
           .D = D,
           .packed_q = {70, 0, 160},
           .packed_k = {130, 10, 160},
           .front_q = 200,
           .front_k = 300,
           .tail_q = 5,
           .tail_k = 9},
          D == 64 ? 2 : 0);
    c.add({.name = "Fronts",
           .D = D,
           .options = {.causal = true},
           .packed_q = {0, 256},
           .packed_k = {3, 256},
           .front_q = 128,
           .front_k = 1});
  }
  cases::Case front{.name = "Fronts", .D = 64, .packed_q = {66, 17}, .packed_k = {94, 30}, .front_q = 200};
  front.bias = front.mask = true, front.front_k = 131;
  c.add(front);

  // With NaN behind the used lengths, in memory that belongs to the tensors.
  for (const std::int64_t D : {64, 256})
    c.add({.name = "UsedLengths",
           .B = 3,
           .Nq = 150,
           .Nk = 260,
           .D = D,
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
    c.add({.name = "Layouts", .B = 2, .Nq = 70, .Nk = 100, .Hq = 4, .Hk = 2, .D = 64, .style = style});
  c.add({.name = "Layouts", .B = 2, .Nq = 70, .Nk = 60, .D = 256, .style = cases::Style::heads_first});
}

inline void add_scores(EmulatedCases& c) {
  c.add({.name = "Sinks", .Nq = 64, .Nk = 300, .D = 128, .sinks = cases::Sinks::finite});
  c.add({.name = "Sinks",
         .Nq = 300,
         .Nk = 100,
         .D = 64,
         .options = {.causal = true},
         .sinks = cases::Sinks::some_infinite});

  // The maximum of the first tile does not do for the others.
  c.add({.name = "GrowingScores", .Nq = 64, .Nk = 700, .D = 64}, 0, 0.3);
  c.add({.name = "GrowingScores", .Nq = 64, .Nk = 700, .D = 128}, 0, 3);
  c.add({.name = "GrowingScores", .Nq = 65, .Nk = 300, .D = 64, .type = Type::f16, .options = {.causal = true}}, 0,
        0.1);

  for (const auto distribution : {cases::Distribution::cold, cases::Distribution::huge, cases::Distribution::outlier}) {
    c.add({.name = "ExtremeNumbers", .Nq = 70, .Nk = 200, .D = 64, .distribution = distribution});
    c.add({.name = "ExtremeNumbers",
           .Nq = 70,
           .Nk = 200,
           .Hq = 1,
           .D = 256,
           .type = Type::f16,
           .distribution = distribution});
  }
}

inline void add_options(EmulatedCases& c) {
  for (const double scale : {0.0, -0.25})
    c.add({.name = "ScaleNotPositive", .Nq = 150, .Nk = 200, .D = 128, .options = {.scale = scale, .causal = true}}, 1);

  c.add({.name = "Softcap", .Nq = 130, .Nk = 200, .D = 128, .options = {.softcap = 1.5}});
  c.add({.name = "Softcap", .Nq = 200, .Nk = 130, .D = 128, .options = {.softcap = 5, .causal = true}}, 1);
  c.add({.name = "Softcap", .Nq = 65, .Nk = 100, .Hq = 1, .D = 256, .type = Type::f16, .options = {.softcap = 2}});

  c.add({.name = "Alibi", .Nq = 130, .Nk = 210, .D = 64, .slopes = cases::Slopes::per_head});
  c.add({.name = "Alibi",
         .D = 64,
         .options = {.alignment = Alignment::offset, .diagonal_offset = 30, .row0 = 5},
         .packed_q = {70, 0, 90},
         .packed_k = {130, 10, 70},
         .slopes = cases::Slopes::per_batch_head});

  const cases::Dims whole{}, of_heads_and_keys{.b = false, .i = false}, of_queries{.b = false, .h = false, .j = false};
  for (const cases::Dims& dims : {whole, of_heads_and_keys, of_queries})
    c.add({.name = "Bias", .B = 2, .Nq = 70, .Nk = 150, .D = 128, .bias = true, .bias_dims = dims});
  c.add({.name = "Bias",
         .Nq = 70,
         .Nk = 150,
         .D = 64,
         .type = Type::f16,
         .bias = true,
         .bias_f32 = true,
         .masked_bias = 0.3});
  c.add({.name = "Bias",
         .D = 128,
         .options = {.causal = true},
         .packed_q = {70, 160},
         .packed_k = {130, 100},
         .bias = true,
         .masked_bias = 0.9});

  for (const cases::Dims& dims : {whole, of_heads_and_keys, of_queries})
    c.add({.name = "Mask", .B = 2, .Nq = 70, .Nk = 150, .D = 64, .mask = true, .mask_dims = dims});
  c.add({.name = "Mask",
         .Nq = 70,
         .Nk = 150,
         .D = 64,
         .mask = true,
         .mask_density = 0.02,
         .sinks = cases::Sinks::finite});

  const Options positions{.dropout = 0.4, .seed = 77, .row0 = 33, .col0 = 101, .head0 = 5, .batch0 = 9};
  c.add({.name = "Dropout", .B = 2, .Nq = 70, .Nk = 150, .D = 64, .options = positions});
  c.add({.name = "Dropout",
         .Nq = 150,
         .Nk = 200,
         .D = 64,
         .options = {.causal = true, .dropout = 0.9, .seed = 5},
         .rng = true},
        1);

  c.add({.name = "WideOutput", .B = 2, .Nq = 130, .Nk = 200, .D = 128, .used_q = {130, 70}, .f32_o = true});
  c.add({.name = "WideOutput", .Nq = 70, .Nk = 100, .Hq = 1, .D = 200, .Dv = 136, .type = Type::f16, .f32_o = true});
  c.add(
      {.name = "WideOutput", .Nq = 200, .Nk = 60, .D = 64, .options = {.causal = true}, .no_lse = true, .f32_o = true});

  const Options options{.scale = -0.3,
                        .softcap = 3,
                        .causal = true,
                        .window_left = 90,
                        .dropout = 0.25,
                        .seed = 11,
                        .row0 = 7,
                        .col0 = 5};
  cases::Case all{.name = "Everything", .B = 2, .Nq = 150, .Nk = 210, .Hq = 2, .D = 128, .options = options};
  all.used_q = {150, 50}, all.used_k = {180, 210};
  all.bias = all.mask = true, all.slopes = cases::Slopes::per_batch_head, all.sinks = cases::Sinks::finite;
  c.add(all, 2);
  all.type = Type::f16, all.D = 256, all.bias_f32 = all.f32_o = true, all.Hq = 1;
  c.add(all, 1);
  all.D = 64, all.used_q.clear(), all.used_k.clear(), all.packed_q = {66, 0, 17, 130}, all.packed_k = {194, 30, 0, 100};
  c.add(all, 1);
}

inline std::vector<EmulatedCase> emulated_cases() {
  EmulatedCases c;
  add_shapes(c), add_lengths(c), add_scores(c), add_options(c);
  return c.all;
}

}  // namespace tessera::emulated
