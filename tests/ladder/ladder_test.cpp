// SPDX-License-Identifier: Apache-2.0
// The ladder's own text, run on the host (tests/emulated) without a GPU: every launch of the plans of `vector_fma`,
// `warp`, `tiled` and `naive`, forward and backward, with the kernels that all GPU families share, against float64.
// Tensor cores are not there, so `vector`'s products are tested on GPUs only. Links tessera_cases; its include path
// puts tests/emulated before src.
#include <algorithm>
#include <map>

#include "tests/emulated/steps.hpp"
#include "tests/ladder/ladder_cases.hpp"
#include "tests/support/support.hpp"

namespace tessera::ladder {
alignas(16) unsigned char memory[emulated::Machine::memory_bytes];
}

#include "ladder_units.hpp"  // written while this is built

namespace tessera::ladder {
namespace {

// False: the rung refuses the case.
bool runs(const Algorithm& rung, cases::CaseData& data, Pass pass) {
  const Call call = call_of(data, pass);
  const Problem problem = problem_of(call, pass);
  const Steps steps = rung.plan(problem, emulated_target());
  if (!steps.reason.empty()) return false;
  emulated::run_steps(steps, problem, call, ladder_units, memory);
  return true;
}

class Ladder : public testing::TestWithParam<const char*> {};

TEST_P(Ladder, AgreesWithTheReference) {
  const std::string name = GetParam();
  const std::vector<Algorithm> rungs = emulated_rungs();
  const Algorithm& rung = *std::find_if(rungs.begin(), rungs.end(), [&](const auto& r) { return name == r.name; });
  int ran = 0;
  for (const cases::Case& spec : ladder_cases()) {
    SCOPED_TRACE(cases::describe(spec));
    cases::CaseData data = cases::build(spec);
    const cases::Expectation expected = cases::expect(data);
    const auto judged = [](const cases::OutputReport& report) {
      EXPECT_TRUE(report.ok) << report.name << " " << report.detail;
    };
    if (!runs(rung, data, Pass::forward)) continue;
    ++ran;
    judged(cases::compare("o", data.o, expected.o)), judged(cases::compare("lse", data.lse, expected.lse));
    if (!runs(rung, data, Pass::backward)) continue;
    ++ran;
    judged(cases::compare("dq", data.dq, expected.dq)), judged(cases::compare("dk", data.dk, expected.dk));
    judged(cases::compare("dv", data.dv, expected.dv));
    if (data.dbias) judged(cases::compare("dbias", data.dbias, expected.dbias));
    for (const cases::Buffer* buffer : std::as_const(data).buffers())
      EXPECT_TRUE(buffer->margins_intact()) << "a margin or gap was written";
    if (HasFailure()) return;
  }
  EXPECT_GT(ran, name == "vector_fma" ? 30 : 15);
}

INSTANTIATE_TEST_SUITE_P(Rungs, Ladder, testing::Values("vector_fma", "warp", "tiled", "naive"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace tessera::ladder
