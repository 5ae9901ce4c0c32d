// SPDX-License-Identifier: Apache-2.0
// The algebra of online softmax: a running maximum m and a sum l of exponentials relative to it, and how results over
// disjoint key sets become one. Shared text, generic over the number type; exp and log are the caller's (natural or
// base 2, as long as both are). Implements docs/algorithm.md, "Online softmax" and "Merge".
#pragma once

#include "math/types.hpp"

namespace tessera {

template <class Number>
inline constexpr Number minus_infinity = Number(-__builtin_bit_cast(float, 0x7f800000u));

// Kernels that compute exp2 keep everything in the exponent times log2(e), and LSE in the end times ln(2).
template <class Number>
inline constexpr Number log2e = Number(1.44269504088896340736);
template <class Number>
inline constexpr Number ln2 = Number(0.693147180559945309417);

// A row that has seen no key has m = -inf, and exp(-inf - (-inf)) would be NaN: its exponents are taken relative to 0.
template <class Number>
constexpr Number exponent_base(Number m) {
  return m == minus_infinity<Number> ? Number(0) : m;
}

// LSE = m + log(l); -inf for a row that sees no key, which has l = 0.
template <class Number, class Log>
constexpr Number log_sum_exp(Number m, Number l, Log log_of) {
  return l == Number(0) ? minus_infinity<Number> : m + log_of(l);
}

// The weight with which a partial result enters the union whose LSE is `lse`; one that saw nothing has weight 0.
template <class Number, class Exp>
constexpr Number merge_weight(Number partial_lse, Number lse, Exp exp_of) {
  return partial_lse == minus_infinity<Number> ? Number(0) : exp_of(partial_lse - lse);
}

}  // namespace tessera
