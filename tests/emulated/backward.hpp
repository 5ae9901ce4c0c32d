// SPDX-License-Identifier: Apache-2.0
// What the tests of the Hopper backward kernels' text share: NaN where a kernel must not look, what the ladder's
// kernels do before, and the judgement of gradients. Included by tests/sm90/sm90_backward_test.cpp and
// tests/sm90/sm90_one_pass_test.cpp.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "core/kernel.hpp"
#include "tests/emulated/backward_cases.hpp"
#include "tests/support/support.hpp"

namespace tessera::emulated {

inline Call backward_call(cases::CaseData& data) {
  Call call{};
  call.inputs = data.inputs(), call.saved = data.saved(), call.gradients = data.gradients();
  call.options = data.options();
  return call;
}

// Rows of a gradient that no sequence uses become 0.
inline void clear_unused(cases::Buffer& gradient, const cases::CaseData& data, bool keys) {
  if (!gradient || data.spec.options.accumulate) return;
  const std::int64_t width = (keys ? data.spec.Hk : data.spec.Hq) * gradient.tensor().shape[gradient.tensor().ndim - 1];
  std::vector<bool> used(std::size_t(gradient.elements() / width));
  for (const cases::Sequence& s : data.sequences)
    for (std::int64_t i = 0; i < (keys ? s.Nk : s.Nq); ++i) used[std::size_t((keys ? s.row_k : s.row_q) + i)] = true;
  for (std::int64_t e = 0; e < gradient.elements(); ++e)
    if (!used[std::size_t(e / width)]) gradient.set(e, 0);
}
inline void clear_unused(cases::CaseData& data) {
  clear_unused(data.dq, data, false), clear_unused(data.dk, data, true), clear_unused(data.dv, data, true);
}

inline void poison_blind_queries(cases::CaseData& data, const cases::Expectation& expected) {
  const std::int64_t Hq = data.spec.Hq;
  for (const cases::Sequence& s : data.sequences)
    for (std::int64_t i = 0; i < s.Nq; ++i)
      for (std::int64_t h = 0; h < Hq; ++h) {
        if (expected.lse.exact[std::size_t(s.lse_first + h * s.lse_head + i)] != -INFINITY) continue;
        for (cases::Buffer* buffer : {&data.q, &data.d_o}) {
          const std::int64_t width = buffer == &data.q ? data.spec.D : data.spec.dim_v();
          for (std::int64_t d = 0; d < width; ++d) buffer->set(((s.row_q + i) * Hq + h) * width + d, NAN);
        }
      }
}

// Builds the case, runs it, `run(data)`, and compares its gradients with float64.
template <class Run>
void check(const BackwardCase& c, Run run) {
  SCOPED_TRACE(cases::describe(c.spec));
  cases::CaseData data = cases::build(c.spec);
  const cases::Expectation expected = cases::expect(data);
  if (c.poison) poison_blind_queries(data, expected);
  run(data);
  const auto judged = [](const cases::OutputReport& report) {
    EXPECT_TRUE(report.ok) << report.name << " " << report.detail;
  };
  if (data.dq) judged(cases::compare("dq", data.dq, expected.dq));
  if (data.dk) judged(cases::compare("dk", data.dk, expected.dk));
  if (data.dv) judged(cases::compare("dv", data.dv, expected.dv));
  for (const cases::Buffer* buffer : std::as_const(data).buffers())
    EXPECT_TRUE(buffer->margins_intact()) << "a margin or gap was written";
}

}  // namespace tessera::emulated
