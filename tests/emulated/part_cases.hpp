// SPDX-License-Identifier: Apache-2.0
// Problems that are cut into calls, for the Hopper forward kernel's text without a GPU. Included by the test that runs
// them (tests/sm90/sm90_parts_test.cpp) and by the program that asks the planner for their tiles (tiles_main.cpp).
#pragma once

#include "tests/emulated/cases.hpp"

namespace tessera::emulated {

// Keys end inside a tile; rows see from none to all of it. By kind of kernel: with and without a maximum of each tile,
// scores one by one.
inline std::vector<EmulatedCase> part_cases() {
  EmulatedCases c;
  const auto add = [&](cases::Case spec, double growth = 0) {
    spec.options.part_invariant = true;
    c.add(std::move(spec), 0, growth);
  };
  add({.name = "plain", .Nq = 70, .Nk = 3 * 96 + 50, .D = 64});
  add({.name = "growing", .Nq = 70, .Nk = 3 * 96 + 50, .Hq = 1, .D = 64, .type = Type::f16}, 0.1);
  add({.name = "causal", .Nq = 300, .Nk = 300, .D = 128, .options = {.causal = true}});
  add({.name = "window_sinks",
       .Nq = 450,
       .Nk = 450,
       .Hq = 1,
       .D = 64,
       .options = {.causal = true, .window_left = 130},
       .sinks = cases::Sinks::finite},
      0.05);
  add({.name = "lengths",
       .B = 3,
       .Nq = 100,
       .Nk = 300,
       .Hq = 1,
       .D = 128,
       .options = {.causal = true, .alignment = Alignment::top_left},
       .used_q = {100, 0, 70},
       .used_k = {300, 200, 128},
       .f32_o = true});
  add({.name = "wide", .Nq = 65, .Nk = 150, .Hq = 1, .D = 256}, 0.1);
  add({.name = "softcap_mask",
       .Nq = 70,
       .Nk = 150,
       .D = 64,
       .options = {.softcap = 3},
       .mask = true,
       .mask_dims = {.h = false},
       .mask_density = 0.02});
  add({.name = "dropout_sinks",
       .B = 2,
       .Nq = 70,
       .Nk = 140,
       .D = 64,
       .options = {.causal = true, .dropout = 0.3, .seed = 5},
       .sinks = cases::Sinks::some_infinite});
  return c.all;
}

}  // namespace tessera::emulated
