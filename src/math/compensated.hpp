// SPDX-License-Identifier: Apache-2.0
// Kahan's compensated sum: what rounding takes from one addition is given back to the next, so that thousands of equal
// terms do not drift. Shared text for the host and for GPUs. docs/numerics.md, "Where rounding happens".
#pragma once

#include "math/types.hpp"

namespace tessera {

// sum += term. `lost`: what sum is too large by, 0 in the beginning.
template <class Number>
constexpr void add_compensated(Number& sum, Number& lost, Number term) {
  const Number exact = term - lost, next = sum + exact;
  lost = (next - sum) - exact;
  sum = next;
}

}  // namespace tessera
