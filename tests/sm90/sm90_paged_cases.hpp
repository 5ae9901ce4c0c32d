// SPDX-License-Identifier: Apache-2.0
// What the Hopper forward kernel is run on with keys in pages: chunks of prompts behind keys that are cached already.
// Included by the test that runs them (sm90_paged_test.cpp) and by the program that asks the planners for their units
// (units_main.cpp).
#pragma once

#include "core/check.hpp"
#include "decode/algorithms.hpp"
#include "sm90/algorithms.hpp"
#include "tests/support/prompts.hpp"

namespace tessera::sm90 {

// Tiles of every head dim, both types, options.
inline std::vector<cases::Case> paged_specs() {
  using test::chunks;
  std::vector<cases::Case> all{chunks(64), chunks(128), chunks(192, 128), chunks(192), chunks(256), chunks(40, 72)};
  cases::Case halves = chunks(192, 128);
  halves.type = Type::f16;
  all.push_back(halves);
  cases::Case window = chunks(64);
  window.options.window_left = 100, window.sinks = cases::Sinks::finite, window.f32_o = true;
  window.Hq = 4, window.Hk = 2;
  all.push_back(window);
  cases::Case everything = chunks(64);
  everything.options.softcap = 3, everything.slopes = cases::Slopes::per_head, everything.options.dropout = 0.2;
  everything.bias = everything.mask = true, everything.type = Type::f16;
  all.push_back(everything);
  for (std::size_t n = 0; n < all.size(); ++n) all[n].seed = n + 1;
  return all;
}

inline const std::vector<cases::Case> mixed_specs{test::mixed_batch(Type::bf16, 64), test::mixed_batch(Type::f16, 192)};

// `hopper`, `hopper_mixed` and `decode`, as src/api/kernels.cpp joins them, with fewer blocks than tiles.
inline gpu::Steps serving_steps(const Problem& problem, const std::string& name) {
  const gpu::AddSteps nothing = [](gpu::Steps&, const Problem&, const cuda::Target&) {};
  cuda::Target target = cuda::target_named("sm_90a");
  target.multiprocessors = 3;
  for (const auto& list : {algorithms(nothing, decode::add_few_rows), decode::algorithms()})
    for (const gpu::Algorithm& algorithm : list)
      if (algorithm.name == name) return algorithm.plan(problem, target);
  return gpu::Steps::refused("there is no " + name);
}

inline Pages pages_of(std::int64_t size) { return {.count = 9, .v_count = 9, .size = size, .entries = 900}; }

inline Problem problem_of(const Call& call) { return check_forward(call.inputs, call.outputs, call.options, {}); }

}  // namespace tessera::sm90
