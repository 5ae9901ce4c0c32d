// SPDX-License-Identifier: Apache-2.0
// What the score of a pair (i, j) depends on besides q and k: the options that change code, and one head's numbers.
// Shared text for the host, SIMD kernels and GPUs; the rule itself is math/score_rule.hpp, which this file includes for
// scalars. Implements docs/algorithm.md, "Scores"; docs/adding_an_option.md lists what a new option touches.
#pragma once

#include "math/types.hpp"

namespace tessera {

// One value on the host and in every kernel's configuration: what is off costs a compiled kernel nothing.
struct ScoreOptions {
  bool softcap = false, alibi = false, bias = false, mask = false, dropout = false;

  constexpr bool operator==(const ScoreOptions&) const = default;

  // Scores are more than products times a factor: by what the rule computes, and by numbers of the caller's.
  constexpr bool change_products() const { return softcap || alibi; }
  constexpr bool change_scores() const { return change_products() || bias; }
  // d score / d (scaled product) is not 1 everywhere: the backward pass multiplies dS by it.
  constexpr bool need_derivative() const { return softcap; }
};

// The options' numbers that all heads share, as the caller gives them.
template <class Number>
struct ScoreParameters {
  Number softcap;  // 0: none
};

// Everything in an exponent carries the factor `unit`: log2(e) where kernels compute exp2, 1 for natural scores.
template <class Number>
struct ScoreNumbers {
  Number factor;  // of a product q.k: it makes the rule's argument
  Number cap;     // the softcap, which the tanh is multiplied by
  Number slope;   // ALiBi's
  Number unit;    // which the bias is multiplied by
};

// The rule's argument, of a product times scale: in units of the softcap if there is one.
template <class Number>
constexpr Number score_argument(const ScoreOptions& options, Number scaled, Number softcap) {
  return options.softcap ? scaled / softcap : scaled;
}

// In the Number's own rounding: kernels that compute in f32 may prepare these in f64, and have them rounded().
template <class Number>
constexpr ScoreNumbers<Number> score_numbers(const ScoreOptions& options, Number scale,
                                             const ScoreParameters<Number>& parameters, Number slope, Number unit) {
  return {.factor = options.softcap ? score_argument(options, scale, parameters.softcap) : scale * unit,
          .cap = parameters.softcap * unit,
          .slope = slope * unit,
          .unit = unit};
}

constexpr ScoreParameters<float> rounded(const ScoreParameters<double>& x) { return {.softcap = float(x.softcap)}; }
constexpr ScoreNumbers<float> rounded(const ScoreNumbers<double>& x) {
  return {.factor = float(x.factor), .cap = float(x.cap), .slope = float(x.slope), .unit = float(x.unit)};
}

#include "math/score_rule.hpp"

}  // namespace tessera
