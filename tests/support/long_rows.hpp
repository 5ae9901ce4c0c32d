// SPDX-License-Identifier: Apache-2.0
// A case whose rows are longer than its heads: memory is aligned to 16 bytes although head dims are not, and what lies
// between a row's end and the next row, NaN, must be neither read nor written.
// Included by the tests of the Hopper kernel, on the host and on a GPU.
#pragma once

#include "tests/support/support.hpp"

namespace tessera::test {

class LongRows {
 public:
  static constexpr std::int64_t D = 90, Dv = 97, row_D = 96, row_Dv = 104;

  LongRows() { copy_columns(truth.q, rows.q), copy_columns(truth.k, rows.k), copy_columns(truth.v, rows.v); }

  // The tensors of `data`, or of a copy elsewhere, with the heads' own dims.
  static Inputs narrowed(Inputs inputs) {
    inputs.q.shape[3] = inputs.k.shape[3] = D, inputs.v.shape[3] = Dv;
    return inputs;
  }
  static Outputs narrowed(Outputs outputs) {
    outputs.o.shape[3] = Dv;
    return outputs;
  }

  void judge() {
    for (std::int64_t e = 0; e < rows.o.elements(); ++e) {
      const std::int64_t row = e / row_Dv, column = e % row_Dv;
      if (column < Dv)
        truth.o.set(row * Dv + column, rows.o.get(e));
      else
        ASSERT_TRUE(rows.o.untouched(e)) << "beyond a row's end: " << rows.o.index(e);
    }
    truth.lse.fill(rows.lse.values());
    const Expectation expected = expect(truth);
    for (const OutputReport& report : {compare("o", truth.o, expected.o), compare_lse(truth.lse, expected.lse)})
      EXPECT_TRUE(report.ok) << report.name << " " << report.detail;
    EXPECT_TRUE(rows.o.margins_intact());
  }

 private:
  static Case spec(std::int64_t D, std::int64_t Dv) {
    return {.name = "long_rows", .Nq = 70, .Nk = 200, .D = D, .Dv = Dv, .type = Type::bf16, .backward = false};
  }
  static void copy_columns(const Buffer& from, Buffer& to) {
    const std::int64_t width = from.size(3), longer = to.size(3);
    to.restore();
    for (std::int64_t e = 0; e < from.elements(); ++e) to.set(e / width * longer + e % width, from.get(e));
  }

  CaseData truth = build(spec(D, Dv));

 public:
  CaseData rows = build(spec(row_D, row_Dv));
};

}  // namespace tessera::test
