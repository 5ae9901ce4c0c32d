// What happens to one score after scale * q.k: softcap, then ALiBi, and the derivative that the backward pass needs.
// Shared text, generic over the number type (double, float, a SIMD vector with operators). `tanh_of` is the caller's.
// Implements docs/algorithm.md, "Scores".
#pragma once

#include "math/types.hpp"

namespace tessera {

// s_cap = cap * tanh(s / cap)
template <class Number, class Tanh>
constexpr Number softcapped(Number s, Number cap, Number inverse_cap, Tanh tanh_of) {
  return cap * tanh_of(s * inverse_cap);
}

// d s_cap / d s = 1 - (s_cap / cap)^2
template <class Number>
constexpr Number softcap_derivative(Number s_cap, Number inverse_cap, Number one) {
  const Number t = s_cap * inverse_cap;
  return one - t * t;
}

// ALiBi's distance |i + row0 + off - (j + col0)|, from j - i and the diagonal's shift = off + row0 - col0.
template <class Number>
constexpr Number alibi_distance(Number j_minus_i, Number shift) {
  const Number distance = j_minus_i - shift;
  return distance < Number(0) ? -distance : distance;
}

}  // namespace tessera
