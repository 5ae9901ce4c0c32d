// SPDX-License-Identifier: Apache-2.0
// What the `mma` forward kernel is run on with keys in pages: chunks of prompts behind keys that are cached already, on
// tiles of every class. Included by the test that runs them (mma_paged_test.cpp) and by the program that asks the
// planners for their units (units_main.cpp).
#pragma once

#include "decode/algorithms.hpp"
#include "tests/mma/mma_cases.hpp"
#include "tests/support/prompts.hpp"

namespace tessera::mma {

struct PagedSpec {
  cases::Case spec;
  const char* architecture;
};

using test::chunks;

inline std::vector<PagedSpec> paged_specs() {
  std::vector<PagedSpec> all;
  const auto add = [&](cases::Case c, const char* architecture) {
    if (architecture == std::string("sm_75")) c.type = Type::f16;
    c.seed = all.size() + 1;
    all.push_back({std::move(c), architecture});
  };
  for (const char* architecture : architectures) add(chunks(64), architecture);
  add(chunks(128), "sm_80");   // 48 keys
  add(chunks(128), "sm_89");   // Q in registers, eight warps
  add(chunks(192), "sm_90a");  // copies between products
  add(chunks(256), "sm_75");   // 16 keys, plain loads
  cases::Case halves = chunks(192, 128);
  halves.type = Type::f16;
  add(halves, "sm_90a");
  // Rows that fill no tile, aligned to 16, 8, 4 and 2 bytes.
  add(chunks(40), "sm_90a");
  add(chunks(68, 36), "sm_80");
  add(chunks(22, 54), "sm_89");
  add(chunks(33, 7), "sm_75");
  cases::Case window = chunks(64);
  window.options.window_left = 100, window.sinks = cases::Sinks::finite, window.f32_o = true;
  add(window, "sm_90a");
  cases::Case everything = chunks(64);
  everything.options.softcap = 3, everything.slopes = cases::Slopes::per_head, everything.options.dropout = 0.2;
  everything.bias = everything.mask = true;
  add(everything, "sm_89");
  return all;
}

// Pages of 8 bits, with scales and without.
inline std::vector<PagedSpec> eight_bit_specs() {
  using cases::Scales;
  const auto cached = [](Type type, std::int64_t D, cases::Cached k, cases::Cached v) {
    cases::Case c = chunks(D);
    c.type = type, c.cached_k = k, c.cached_v = v, c.seed = 3;
    return c;
  };
  cases::Case capped = cached(Type::bf16, 64, {Type::e4m3, Scales::per_sequence}, {Type::i8, Scales::one});
  capped.options.softcap = 3, capped.Hq = 4, capped.Hk = 2;
  return {{cached(Type::bf16, 64, {.type = Type::e4m3}, {.type = Type::e4m3}), "sm_90a"},
          {cached(Type::f16, 40, {.type = Type::i8}, {.type = Type::e4m3}), "sm_75"},
          {cached(Type::bf16, 36, {.type = Type::e4m3}, {}), "sm_89"},
          {cached(Type::bf16, 128, {Type::i8, Scales::per_head}, {Type::i8, Scales::per_head}), "sm_80"},
          {cached(Type::f16, 192, {.scales = Scales::per_head}, {Type::e4m3, Scales::one}), "sm_90a"},
          {capped, "sm_100a"}};
}

inline cases::Case without_cache(cases::Case c) {
  c.cached_k = c.cached_v = {};
  return c;
}

inline const std::vector<PagedSpec> mixed_specs{{test::mixed_batch(Type::bf16, 64), "sm_90a"},
                                                {test::mixed_batch(Type::f16, 192), "sm_90a"},
                                                {test::mixed_batch(Type::bf16, 64), "sm_89"}};

// `mma_mixed` and `decode`, as src/api/kernels.cpp joins them.
inline gpu::Steps serving_steps(const Problem& problem, const char* architecture, const std::string& name) {
  const gpu::AddSteps nothing = [](gpu::Steps&, const Problem&, const cuda::Target&) {};
  cuda::Target target = cuda::target_named(architecture);
  target.multiprocessors = 3;
  for (const auto& list : {algorithms(nothing, decode::add_few_rows), decode::algorithms()})
    for (const gpu::Algorithm& algorithm : list)
      if (algorithm.name == name) return algorithm.plan(problem, target);
  return gpu::Steps::refused("there is no " + name);
}

}  // namespace tessera::mma
