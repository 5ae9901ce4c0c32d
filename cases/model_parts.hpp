// SPDX-License-Identifier: Apache-2.0
// Parts of the rounding model: sums of products with their absolute values, sums of rows with their errors, places in
// tensors that broadcast. Included by cases/model.cpp only. Implements docs/numerics.md, "The rule".
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "cases/buffer.hpp"
#include "cases/model.hpp"

namespace tessera::cases {

using Values = std::vector<double>;
inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// Four partial sums let the compiler vectorise; strict float64 order would make this the slowest loop.
struct Dots {
  double sum, absolute;
  Dots operator+(const Dots& x) const { return {sum + x.sum, absolute + x.absolute}; }
};
inline Dots dots(const double* a, const double* b, std::int64_t n) {
  std::array<double, 4> sum{}, absolute{};
  std::int64_t d = 0;
  for (; d + 4 <= n; d += 4)
    for (std::size_t lane = 0; lane < 4; ++lane) {
      const double product = a[at(d) + lane] * b[at(d) + lane];
      sum[lane] += product, absolute[lane] += std::abs(product);
    }
  for (; d < n; ++d) sum[0] += a[d] * b[d], absolute[0] += std::abs(a[d] * b[d]);
  return {sum[0] + sum[1] + sum[2] + sum[3], absolute[0] + absolute[1] + absolute[2] + absolute[3]};
}

// y += f x, and the same in absolute values with its own factor.
inline void add_scaled(double* y, double* y_bound, const double* x, double f, double f_bound, std::int64_t n) {
  for (std::int64_t d = 0; d < n; ++d) y[d] += f * x[d], y_bound[d] += f_bound * std::abs(x[d]);
}

// An accumulated tensor: the model's values, their bounds, and per row of `width` elements the variance of the rounding
// errors and the norm of what underflow may lose.
struct Sum {
  std::int64_t width;
  Values model, bound, variance, lost;
  Sum(std::int64_t n, std::int64_t row) :
      width(row), model(at(n), 0.0), bound(at(n), 0.0), variance(at(n / row), 0.0), lost(variance) {}
  // Rows of `part` are `heads` rows apart here.
  void add(const Sum& part, std::int64_t first_row, std::int64_t heads) {
    for (std::size_t e = 0; e < part.model.size(); ++e) {
      const std::size_t row = at(first_row) + e / at(width) * at(heads), to = row * at(width) + e % at(width);
      model[to] += part.model[e], bound[to] += part.bound[e];
    }
    for (std::size_t r = 0; r < part.variance.size(); ++r) {
      const std::size_t to = at(first_row) + r * at(heads);
      variance[to] += part.variance[r], lost[to] += part.lost[r];
    }
  }
};

// Variance of the error of rounding x once; 0 if x is exactly representable.
inline double variance(Type type, double x) {
  const double unit = spacing(type, x);
  return round_to(type, x) == x ? 0 : unit * unit / 12;
}

inline double square(const double* x, std::int64_t n) { return dots(x, x, n).sum; }

// Of each row of `width` elements.
inline Values squares(const Values& x, std::int64_t width) {
  Values all(x.size() / at(width));
  for (std::size_t row = 0; row < all.size(); ++row) all[row] = square(&x[row * at(width)], width);
  return all;
}

// What underflow may lose of a probability.
inline double lost_of(double p) { return std::min(p, lost_probability); }

// Strides of a tensor that broadcasts over dimensions of size 1.
struct ScoreIndex {
  std::array<std::int64_t, 4> stride{};
  explicit ScoreIndex(const Buffer& buffer) {
    std::int64_t step = 1;
    for (int d = 3; d >= 0 && buffer; --d) {
      if (buffer.size(d) > 1) stride[at(d)] = step;
      step *= buffer.size(d);
    }
  }
  std::size_t operator()(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    return at(b * stride[0] + h * stride[1] + i * stride[2] + j * stride[3]);
  }
};

}  // namespace tessera::cases
