// SPDX-License-Identifier: Apache-2.0
// Expected outputs of a case: in float64; in a model that rounds only where the contract allows it; and the sums of
// absolute values that scale the rest of the tolerance. Included by cases/ and tests/. Implements docs/numerics.md,
// "The rule".
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
  // Norm of the model's rounding error that its variances predict, with a margin of three standard deviations. |Xmodel
  // - X64| is one sample of that error: reliable for a large tensor, noise where only a few numbers were rounded.
  double rounding = 0;
  // |U|: what may be lost because probabilities below `lost_probability` and products below `lost_product` may be 0.
  double underflow = 0;
};

// f32's smallest normal number: kernels may flush subnormals to zero, wherever they multiply or add.
inline constexpr double lost_product = 0x1p-126;
// Lazy rescaling: exponentials are relative to a running maximum that may lag behind the row's maximum, by a factor of
// 2^8 in the CPU kernels and of a row's sum in `hopper`. What is below 2^-126 relative to it becomes 0, and so may a
// rescaling factor.
inline constexpr double lost_probability = 0x1p-100;

struct Expectation {
  Expected o, lse, dq, dk, dv, dbias, dsinks;
};

// Runs the reference kernel for `exact`, and for the rest loops of its own that share no code with the library.
// Gradients are there when the case has a backward pass; all of them, asked for or not.
Expectation expect(const CaseData& data);

// The contract's dropout, written from its definition: is element (b,h,i,j) kept? Positions include row0 and so on.
bool kept(std::uint64_t seed, std::uint64_t offset, double p_drop, std::int64_t b, std::int64_t h, std::int64_t i,
          std::int64_t j);

}  // namespace tessera::cases
