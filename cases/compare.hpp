// SPDX-License-Identifier: Apache-2.0
// Judges one output against float64: the accuracy rule; positions of infinities and NaN, which must match exactly; rows
// that must stay unwritten. Included by cases/ and tests/. Implements docs/numerics.md, "The rule".
#pragma once

#include <string>

#include "cases/buffer.hpp"
#include "cases/model.hpp"
#include "cases/suite.hpp"

namespace tessera::cases {

// |X - X64| <= max(1.5 |Xmodel - X64|, R) + 8 * 2^-24 |A| + |U|, norms over the whole tensor. R is the model's expected
// rounding error: on a tensor of a few elements the model's actual error may be small by chance, and a kernel's need
// not be. U is what underflow may lose.
inline constexpr double model_factor = 1.5;
inline constexpr double absolute_factor = 8 * 0x1p-24;

OutputReport compare(const std::string& name, const Buffer& output, const Expected& expected);
// LSE is judged element by element: 8 * 2^-24 * bound, and half a spacing for its own rounding.
OutputReport compare_lse(const Buffer& output, const Expected& expected);

}  // namespace tessera::cases
