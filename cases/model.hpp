// What a case's outputs should be: in float64, in a model that rounds only where the contract allows it, and the
// sums of absolute values that scale the rest of the allowance.
// Included by cases/ and tests/. Implements docs/numerics.md, "The rule".
#pragma once

#include <cstdint>
#include <vector>

#include "cases/case.hpp"

namespace tessera::cases {

// One output, elements in row-major order of its shape.
struct Expected {
  std::vector<double> exact;    // X64: the reference kernel on f64 copies of the inputs
  std::vector<double> model;    // Xmodel: float64, but P, dS, O before delta and the output itself rounded
  std::vector<double> bound;    // A; NaN where the call must not write. LSE: max(1, max_j c_ij)
  std::vector<double> initial;  // what the buffer held, when the case accumulates
  // How far the model's roundings may carry the tensor, by their variances, with three standard deviations to spare.
  // |Xmodel - X64| is one draw of them: reliable for a large tensor, luck where only a few numbers were rounded.
  double rounding = 0;
};

struct Expectation {
  Expected o, lse, dq, dk, dv, dbias, dsinks;
};

// Runs the reference kernel for `exact` and this file's own loops, which share no text with the library, for the rest.
// Gradients are there when the case has a backward pass; all of them, asked for or not.
Expectation expect(const CaseData& data);

// The contract's dropout, written from its definition: is element (b,h,i,j) kept? Positions include row0 and so on.
bool kept(std::uint64_t seed, std::uint64_t offset, double p_drop, std::int64_t b, std::int64_t h, std::int64_t i,
          std::int64_t j);

}  // namespace tessera::cases
