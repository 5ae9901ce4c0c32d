// The algebra of online softmax: a running maximum m and a sum l of exponentials relative to it, and how two such
// states become one. Shared text, generic over the number type. Implements docs/algorithm.md, "Online softmax" and
// "Merge".
#pragma once

#include "math/types.hpp"

namespace tessera {

// A row that has seen no key has m = -inf. exp(-inf - (-inf)) would be NaN, so exponents are taken relative to this:
template <class Number>
constexpr Number safe_max(Number m) {
  return m == -Number(__builtin_inf()) ? Number(0) : m;
}

// A dropped probability of p close to 1 can round to t = 65536; validation refuses it, so l > 0 wherever m > -inf.
// LSE = m + log(l); -inf for a row that sees no key.
template <class Number>
Number log_sum_exp(Number m, Number l) {
  return l > Number(0) || l != l ? m + Number(__builtin_log(double(l))) : -Number(__builtin_inf());
}

// Weights with which partial results over disjoint key sets enter their union: O = sum_k weight_k O_k.
// lse: the union's; a partial that saw nothing has weight 0.
template <class Number>
Number merge_weight(Number partial_lse, Number lse) {
  return partial_lse == -Number(__builtin_inf()) ? Number(0) : Number(__builtin_exp(double(partial_lse - lse)));
}

}  // namespace tessera
