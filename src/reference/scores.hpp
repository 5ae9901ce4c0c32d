// SPDX-License-Identifier: Apache-2.0
// The reference's scores of one (sequence, head), straight from docs/algorithm.md, in float64. Of the mask it uses only
// visible(), the definition. Included by reference/forward.cpp and reference/backward.cpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/sequence.hpp"
#include "math/philox.hpp"

namespace tessera::reference {

inline constexpr double infinity = std::numeric_limits<double>::infinity();

// A matrix of float64 rows, with room for the longest sequence: all of it is taken before the first output is written.
struct Matrix {
  std::int64_t width = 0;
  std::vector<double> values;

  Matrix(std::int64_t rows, std::int64_t width) : width(width), values(static_cast<std::size_t>(rows * width)) {}
  // Copied from a tensor of any type.
  void load(const TokenRows& source, std::int64_t h, std::int64_t rows) {
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t d = 0; d < width; ++d) (*this)[i][d] = load_element(source.at(i, h), source.type, d);
  }
  void load(const KeyRows& source, std::int64_t keys) {
    for (std::int64_t j = 0; j < keys; ++j)
      for (std::int64_t d = 0; d < width; ++d)
        (*this)[j][d] = double(source.scale(j, d)) * load_element(source.row(j), source.type, d);
  }
  void clear() { std::fill(values.begin(), values.end(), 0.0); }
  double* operator[](std::int64_t i) { return values.data() + i * width; }
  const double* operator[](std::int64_t i) const { return values.data() + i * width; }
};

// The longest of the sequences.
struct Longest {
  std::int64_t nq = 0, nk = 0;
  Longest(const Problem& p, const Call& call) {
    for (std::int64_t b = 0; b < p.B; ++b) {
      const Sequence s = sequence_of(p, call, b);
      nq = std::max(nq, s.nq), nk = std::max(nk, s.nk);
    }
  }
};

inline double dot(const double* a, const double* b, std::int64_t n) {
  double sum[4] = {};  // four chains: the compiler may not reorder one
  std::int64_t d = 0;
  for (; d + 4 <= n; d += 4)
    for (int c = 0; c < 4; ++c) sum[c] += a[d + c] * b[d + c];
  for (; d < n; ++d) sum[0] += a[d] * b[d];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// The operations of math/score_rule.hpp.
struct Float64 {
  using Number = double;
  static double set(double x) { return x; }
  static double multiply(double a, double b) { return a * b; }
  static double multiply_add(double a, double b, double c) { return c + a * b; }
  static double negative_multiply_add(double a, double b, double c) { return c - a * b; }
  static double tanh(double x) { return std::tanh(x); }
  static double abs(double x) { return std::fabs(x); }
};

// One query head of one sequence: everything that turns q.k into a score, and the dropout factor.
struct Head {
  using Rule = ScoreRule<Float64>;

  const Problem& p;
  const Sequence& s;
  std::int64_t h;
  ScoreOptions options;
  ScoreNumbers<double> numbers;
  double sink;
  PairNumbers bias, mask;
  PhiloxKey key;
  std::uint32_t threshold;

  Head(const Problem& p, const Call& call, const Sequence& s, std::int64_t h) :
      p(p), s(s), h(h), options(p.score_options()), numbers(score_numbers_of(call, p, s.b, h, 1)),
      sink(sink_of(call, h)), bias(pair_numbers(call.inputs.bias, s)), mask(pair_numbers(call.inputs.mask, s)),
      threshold(dropout_threshold(p.options.dropout)) {
    const DropoutSeed seed = dropout_seed(call.options, call.inputs.rng);
    key = dropout_key(seed.seed, seed.offset);
  }

  bool visible(std::int64_t i, std::int64_t j) const {
    const bool seen = s.rows ? j < s.nk && s.rows.visible(i, j) : s.mask.visible(i, j);
    return seen && (!mask || mask.get(h, i, j) != 0);
  }

  // What the rule asks about (i, j).
  struct Element {
    const Head& head;
    std::int64_t i, j;
    double distance() const { return static_cast<double>(j - head.s.rows.place(i)); }
    double bias() const { return head.bias.get(head.h, i, j); }
  };

  // s_cap of a product, equation (2), and its derivative, (12).
  double capped(double qk, std::int64_t i, std::int64_t j) const {
    const double argument = score_argument(options, p.options.scale * qk, numbers.cap);
    return Rule::capped(options, numbers, argument, Element{*this, i, j});
  }
  double derivative(double s_cap, std::int64_t i, std::int64_t j) const {
    return Rule::derivative_of(options, numbers, score_argument(options, s_cap, numbers.cap), Element{*this, i, j});
  }

  // The score that enters the softmax, equation (3).
  double score(double s_cap, std::int64_t i, std::int64_t j) const {
    return visible(i, j) ? Rule::placed(options, numbers, s_cap, Element{*this, i, j}) : -infinity;
  }

  // z / (1 - p_drop)
  double keep(std::int64_t i, std::int64_t j) const {
    if (threshold == 0) return 1;
    const std::int64_t head = h + p.options.head0, row = i + s.row0, col = j + s.col0;
    const Philox4 block = dropout_block(key, s.batch, head, row, col);
    return dropout_value(block, row, col) >= threshold ? dropout_scale(threshold) : 0;
  }
};

}  // namespace tessera::reference
