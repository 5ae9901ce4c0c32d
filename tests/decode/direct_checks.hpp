// SPDX-License-Identifier: Apache-2.0
// Blocks of `decode` that find their work items without a queue, beside those that have one. Included by the tests of
// tests/decode that run cases both ways.
#pragma once

#include "cases/model.hpp"
#include "tests/decode/decode_run.hpp"
#include "tests/decode/direct_cases.hpp"
#include "tests/support/support.hpp"

namespace tessera::decode {

// Cases without a queue, on as few multiprocessors as that takes, so that blocks have several items or clusters are
// small, and on many: the bits are those of a queue, which agree with the reference. There are clusters of every size.
template <std::size_t memory_bytes>
void check_direct(const std::vector<DecodeCase>& all, const Units& units, unsigned char (&memory)[memory_bytes]) {
  std::set<int> sizes;
  for (const DecodeCase& c : all) {
    SCOPED_TRACE(cases::describe(c.spec) + " on " + c.architecture);
    const auto ran = [&](const Run& how) {
      cases::CaseData data = cases::build(c.spec);
      run_plan(problem_of(call_of(data)), call_of(data), how, units, memory);
      return data;
    };
    const cases::CaseData queued = ran({.architecture = c.architecture});
    const cases::Expectation expected = cases::expect(queued);
    for (const cases::OutputReport& report :
         {cases::compare("o", queued.o, expected.o), cases::compare_lse(queued.lse, expected.lse)})
      EXPECT_TRUE(report.ok) << report.name << " " << report.detail;
    const Problem problem = problem_of(call_of(queued));
    for (const int multiprocessors : cluster_multiprocessors(problem)) {
      // So few are enough for blocks of many keys alone.
      const gpu::Steps steps = steps_of(problem, target_of(c.architecture, multiprocessors), true);
      EXPECT_TRUE(steps.reason.empty() || multiprocessors == most_clusters(problem)) << steps.reason;
      if (!steps.reason.empty()) continue;
      sizes.insert(steps.list.back().cluster);
      SCOPED_TRACE(multiprocessors);
      const cases::CaseData data =
          ran({.architecture = c.architecture, .multiprocessors = multiprocessors, .direct = true});
      test::expect_same_bits(queued.o, data.o, "o"), test::expect_same_bits(queued.lse, data.lse, "lse");
      for (const cases::Buffer* buffer : data.buffers()) EXPECT_TRUE(buffer->margins_intact());
      if (testing::Test::HasFailure()) return;
    }
  }
  EXPECT_EQ(sizes, (std::set<int>{1, 2, 4, 8, 16}));
}

}  // namespace tessera::decode
