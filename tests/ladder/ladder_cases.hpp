// SPDX-License-Identifier: Apache-2.0
// What the ladder's own text is run on without a GPU: small cases of one pair of head dims, so that few kernels are
// compiled. Included by the test that runs them (ladder_test.cpp) and by the program that asks the planners for their
// units (units_main.cpp).
#pragma once

#include <string>
#include <vector>

#include "cases/case.hpp"
#include "core/check.hpp"
#include "core/kernel.hpp"
#include "gpu/step.hpp"
#include "ladder/ladder.hpp"

namespace tessera::ladder {

inline Call call_of(cases::CaseData& data, Pass pass) {
  Call call{};
  call.inputs = data.inputs(), call.options = data.options();
  if (pass == Pass::forward) call.outputs = data.outputs();
  if (pass == Pass::backward) call.saved = data.saved(), call.gradients = data.gradients();
  return call;
}

inline Problem problem_of(const Call& call, Pass pass) {
  if (pass == Pass::forward) return check_forward(call.inputs, call.outputs, call.options, {});
  return check_backward(call.inputs, call.saved, call.gradients, call.options, {});
}

// `vector` multiplies on tensor cores, which the emulated machine does not have; the rest of it is `vector_fma`.
inline std::vector<Algorithm> emulated_rungs() {
  std::vector<Algorithm> rungs = algorithms();
  std::erase_if(rungs, [](const Algorithm& rung) { return std::string(rung.name) == "vector"; });
  return rungs;
}

// A GPU without tensor cores for TF32.
inline cuda::Target emulated_target() { return cuda::target_named("sm_75"); }

inline std::vector<cases::Case> ladder_cases() {
  std::vector<cases::Case> all;
  const auto add = [&](cases::Case c) {
    c.D = 24, c.Dv = 16, c.Hk = c.Hq / 2;
    c.options.deterministic = false;  // or `tiled` refuses
    c.seed = all.size() + 1;
    all.push_back(std::move(c));
  };
  add({.name = "full", .B = 2, .Nq = 70, .Nk = 90, .Hq = 4});
  add({.name = "full", .Nq = 3, .Nk = 1, .dlse = true});
  add({.name = "causal", .Nq = 70, .Nk = 100, .options = {.causal = true}});
  add({.name = "causal", .Nq = 100, .Nk = 40, .options = {.causal = true}});
  add({.name = "window", .Nq = 90, .Nk = 90, .options = {.window_left = 20, .window_right = 5}});
  add({.name = "packed",
       .options = {.causal = true},
       .packed_q = {30, 0, 70, 5},
       .packed_k = {40, 10, 60, 0},
       .front_q = 20,
       .front_k = 50,
       .tail_q = 5,
       .tail_k = 9});
  add({.name = "used lengths", .B = 3, .Nq = 50, .Nk = 70, .used_q = {50, 20, 0}, .used_k = {10, 70, 30}});
  add({.name = "layout", .B = 2, .Nq = 20, .Nk = 40, .style = cases::Style::gaps});
  add({.name = "layout", .B = 2, .Nq = 20, .Nk = 40, .style = cases::Style::shifted});
  add({.name = "accumulate", .Nq = 40, .Nk = 40, .options = {.accumulate = true}});
  // Options, which `vector_fma` alone takes, each by itself and all together.
  add({.name = "softcap", .Nq = 40, .Nk = 50, .options = {.softcap = 2}});
  add({.name = "alibi", .Nq = 40, .Nk = 50, .slopes = cases::Slopes::per_head});
  add({.name = "bias", .B = 2, .Nq = 40, .Nk = 50, .bias = true, .bias_dims = {.b = false, .i = false}});
  add({.name = "mask", .B = 2, .Nq = 40, .Nk = 50, .mask = true, .mask_dims = {.h = false}});
  add({.name = "dropout", .Nq = 40, .Nk = 50, .options = {.dropout = 0.3, .seed = 5, .row0 = 33, .col0 = 101}});
  add({.name = "all options",
       .B = 2,
       .Nq = 40,
       .Nk = 70,
       .options = {.softcap = 3, .causal = true, .dropout = 0.25, .seed = 7},
       .bias = true,
       .mask = true,
       .slopes = cases::Slopes::per_batch_head,
       .sinks = cases::Sinks::finite,
       .grads = {.dsinks = false}});
  return all;
}

}  // namespace tessera::ladder
