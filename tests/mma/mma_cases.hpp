// SPDX-License-Identifier: Apache-2.0
// What the `mma` kernels' own text is run on without a GPU: the cases of the Hopper kernel, on tiles of every class,
// and those that Hopper's tensor copies do not take. Included by the test that runs them (mma_machine_test.cpp) and by
// the program that asks the planner for their units (units_main.cpp).
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "core/check.hpp"
#include "core/kernel.hpp"
#include "cuda/device.hpp"
#include "mma/algorithms.hpp"
#include "mma/one_pass_config.hpp"
#include "mma/plan.hpp"
#include "tests/emulated/backward_cases.hpp"
#include "tests/emulated/cases.hpp"

namespace tessera::mma {

struct MmaCase {
  cases::Case spec;  // its name is that of its group
  double growth = 0;
  const char* architecture;  // whose tiles it gets
};

inline constexpr const char* architectures[] = {"sm_90a", "sm_80", "sm_89", "sm_75", "sm_100a"};

inline std::vector<MmaCase> mma_cases() {
  emulated::EmulatedCases all{emulated::emulated_cases()};
  for (const cases::Style style : {cases::Style::gaps, cases::Style::shifted, cases::Style::mixed})
    all.add({.name = "Unaligned", .B = 2, .Nq = 40, .Nk = 100, .Hq = 4, .Hk = 2, .D = 64, .style = style});
  all.add({.name = "Unaligned", .Nq = 20, .Nk = 70, .D = 68, .Dv = 36});
  all.add({.name = "Unaligned", .Nq = 20, .Nk = 70, .D = 22, .Dv = 54, .options = {.causal = true}});
  all.add({.name = "Unaligned", .Nq = 20, .Nk = 70, .D = 1, .Dv = 3});
  all.add({.name = "Unaligned", .Nq = 20, .Nk = 70, .D = 129, .Dv = 255, .f32_o = true});
  all.add({.name = "Unaligned", .B = 2, .Nq = 20, .Nk = 70, .D = 72, .used_k = {3, 70}, .style = cases::Style::gaps});

  // The groups that tiles decide about run on tiles of every class, the others take turns.
  std::vector<MmaCase> out;
  std::size_t turn = 0;
  for (const emulated::EmulatedCase& c : all.all) {
    const bool everywhere = c.spec.name == "Full" || c.spec.name == "GrowingScores" || c.spec.name == "Everything";
    for (std::size_t n = 0; n < (everywhere ? std::size(architectures) : 1); ++n) {
      MmaCase one{c.spec, c.growth, architectures[turn++ % std::size(architectures)]};
      if (one.architecture == std::string("sm_75")) one.spec.type = Type::f16;
      out.push_back(one);
    }
  }
  return out;
}

struct MmaBackwardCase {
  emulated::BackwardCase c;
  const char* architecture;  // whose tiles it gets
};

// The cases of the Hopper backward kernels, and some that tensor copies do not take. Classes take turns; sm_75 has no
// tile for every head dim.
inline std::vector<MmaBackwardCase> mma_backward_cases() {
  emulated::BackwardCases all{emulated::backward_cases()};
  for (const cases::Style style : {cases::Style::gaps, cases::Style::shifted})
    all.add({.name = "Unaligned", .B = 2, .Nq = 40, .Nk = 100, .Hq = 4, .Hk = 2, .D = 64, .style = style});
  all.add({.name = "Unaligned", .Nq = 20, .Nk = 70, .D = 22, .Dv = 54, .options = {.causal = true}});
  // Blocks of keys without a head of queries: nothing may be copied, not even ahead.
  all.add({.name = "NoQueryHeads", .B = 2, .Nq = 40, .Nk = 100, .Hq = 0, .Hk = 2, .D = 64});
  std::vector<MmaBackwardCase> out;
  std::size_t turn = 0;
  for (const emulated::BackwardCase& c : all.all) {
    MmaBackwardCase one{c, architectures[turn++ % std::size(architectures)]};
    if (one.architecture == std::string("sm_75") && c.spec.D + c.spec.dim_v() > 256) one.architecture = "sm_89";
    if (one.architecture == std::string("sm_75")) one.c.spec.type = Type::f16;
    out.push_back(one);
  }
  return out;
}

inline Call call_of(cases::CaseData& data) {
  Call call{};
  call.inputs = data.inputs(), call.options = data.options(), call.outputs = data.outputs();
  if (data.spec.no_lse) call.outputs.lse = {};
  return call;
}

inline Problem problem_of(const Call& call) { return check_forward(call.inputs, call.outputs, call.options, {}); }

// dBias is another family's, and so are sequences of few rows.
inline std::vector<gpu::Algorithm> algorithms_of_mma() {
  const gpu::AddSteps nothing = [](gpu::Steps&, const Problem&, const cuda::Target&) {};
  return algorithms(nothing, nothing);
}
inline gpu::Steps steps_of(const Problem& problem, const char* architecture, const std::string& name) {
  const std::vector<gpu::Algorithm> all = algorithms_of_mma();
  return std::ranges::find(all, name, &gpu::Algorithm::name)->plan(problem, cuda::target_named(architecture));
}
inline gpu::Steps steps_of(const Problem& problem, const char* architecture) {
  return steps_of(problem, architecture, problem.pass == Pass::forward ? "mma" : "mma_two_pass");
}

// The cases of the backward pass that one pass takes. Classes take turns; cases that tiles decide about run in each. In
// order, and some as it comes, too.
struct OnePassCase {
  emulated::BackwardCase c;
  const char* architecture;
};
inline gpu::Steps one_pass_steps_of(const Problem& problem, const char* architecture, int turn_tiles) {
  return one_pass_steps(problem, cuda::target_named(architecture), turn_tiles);
}
inline Problem backward_problem(cases::CaseData& data) {
  return check_backward(data.inputs(), data.saved(), data.gradients(), data.options(), {});
}
inline std::vector<OnePassCase> one_pass_cases() {
  emulated::BackwardCases all{emulated::backward_cases()};
  all.add({.name = "Unaligned", .B = 2, .Nq = 40, .Nk = 100, .Hq = 4, .Hk = 2, .D = 64, .style = cases::Style::gaps});
  all.add({.name = "Unaligned", .Nq = 20, .Nk = 70, .D = 22, .Dv = 54, .options = {.causal = true}});
  // LSE so low that exp2(0 - LSE) is inf, in a block that lacks keys.
  all.add({.name = "ExtremeNumbers", .Nq = 64, .Nk = 200, .D = 64, .distribution = cases::Distribution::cold});
  std::vector<OnePassCase> out;
  std::size_t turn = 0;
  constexpr const char* classes[] = {"sm_90a", "sm_80", "sm_89", "sm_75"};  // sm_100a has sm_90a's tiles
  for (const emulated::BackwardCase& c : all.all) {
    cases::CaseData data = cases::build(c.spec);
    if (!steps_of(backward_problem(data), "sm_90a", "mma_one_pass").reason.empty()) continue;
    const bool narrow = c.spec.D <= 128 && c.spec.dim_v() <= 128;
    const bool everywhere = c.spec.name == "Full";
    for (std::size_t n = 0; n < (everywhere ? std::size(classes) : 1); ++n) {
      OnePassCase one{c, classes[turn++ % std::size(classes)]};
      const bool turing = one.architecture == std::string("sm_75");
      if (turing && narrow) one.c.spec.type = Type::f16;
      if (turing && !narrow) one.architecture = "sm_89";
      out.push_back(one);
      if (c.spec.name != "Causal" && c.spec.name != "UsedLengths") continue;
      one.c.spec.options.deterministic = false;
      out.push_back(one);
    }
  }
  return out;
}

}  // namespace tessera::mma
