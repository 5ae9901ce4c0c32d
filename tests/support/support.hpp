// SPDX-License-Identifier: Apache-2.0
// What several test files share: kernels of this machine, simple tensors, bitwise comparison.
// Included by tests/ only.
// Implements no document; see cases/ for the tables and the judge.
#pragma once

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "cases/compare.hpp"
#include "cases/model.hpp"
#include "cases/suite.hpp"
#include "tests/support/main.hpp"

namespace tessera::test {

using namespace tessera::cases;  // tests are written in the words of the cases

// Fails the test with everything that a person needs, skipped reports excepted: a test must have others.
inline void expect_ok(const CaseReport& report) {
  EXPECT_TRUE(report.ok || report.skipped) << cases::to_text(report);
  ++(report.skipped ? case_count.refused : case_count.judged);
}

inline void expect_same_bits(const Buffer& a, const Buffer& b, const std::string& what) {
  ASSERT_EQ(a.elements(), b.elements()) << what;
  const auto x = a.bits(), y = b.bits();
  for (std::size_t e = 0; e < x.size(); ++e)
    ASSERT_EQ(x[e], y[e]) << what << a.index(static_cast<std::int64_t>(e)) << ": "
                          << a.get(static_cast<std::int64_t>(e)) << " and " << b.get(static_cast<std::int64_t>(e));
}

// Forward and, where the case has one, backward of a built case.
inline void run(const CaseData& data, const Execution& execution = {}) {
  forward(data.inputs(), data.outputs(), data.options(), execution);
  if (data.spec.backward) backward(data.inputs(), data.saved(), data.gradients(), data.options(), execution);
}

// The kernels that are worth testing besides the oracle: at least one.
inline std::vector<std::string> cpu_kernels() {
  std::vector<std::string> names = available_kernels();
  std::erase(names, "reference");
  if (names.empty()) throw std::runtime_error("no kernel but the reference runs on this machine");
  return names;
}

// Judges every output of a case that a test has changed by hand after building it.
inline void expect_accurate(CaseData& data, const Execution& execution) {
  const Expectation expected = expect(data);
  run(data, execution);
  const auto judged = [&](const OutputReport& report) {
    EXPECT_TRUE(report.ok) << (execution.kernel ? execution.kernel : "best") << ": " << report.name << " "
                           << report.detail << "; " << describe(data.spec);
  };
  judged(compare("o", data.o, expected.o));
  judged(compare_lse(data.lse, expected.lse));
  if (data.dq) judged(compare("dq", data.dq, expected.dq));
  if (data.dk) judged(compare("dk", data.dk, expected.dk));
  if (data.dv) judged(compare("dv", data.dv, expected.dv));
  if (data.dbias) judged(compare("dbias", data.dbias, expected.dbias));
  if (data.dsinks) judged(compare("dsinks", data.dsinks, expected.dsinks));
}

inline Buffer filled(Type type, const Shape& shape, double value) {
  Buffer buffer(type, shape);
  for (std::int64_t e = 0; e < buffer.elements(); ++e) buffer.set(e, value);
  return buffer;
}

inline Buffer of(Type type, const Shape& shape, const std::vector<double>& values) {
  Buffer buffer(type, shape);
  buffer.fill(values);
  return buffer;
}

}  // namespace tessera::test
