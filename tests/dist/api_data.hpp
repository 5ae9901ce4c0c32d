// SPDX-License-Identifier: Apache-2.0
// A small problem's numbers, as tensors of the public interface, and what calls say. Included by the tests of that
// interface, tests/dist/api_test.cpp and api_decode_test.cpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "tessera/dist.hpp"

namespace tessera {

inline std::string said(tessera_status status) { return status == TESSERA_OK ? "" : tessera_last_error(); }

template <class Body>
std::string caught(Body body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

inline constexpr std::int64_t tokens = 192, heads = 4, kv_heads = 2, dim = 16;

struct Data {
  std::vector<float> q, k, v, d_o, o, lse, dq, dk, dv;
  explicit Data(std::int64_t n) {
    for (auto* x : {&q, &d_o, &o, &dq}) x->resize(std::size_t(n * heads * dim));
    for (auto* x : {&k, &v, &dk, &dv}) x->resize(std::size_t(n * kv_heads * dim));
    lse.resize(std::size_t(n * heads));
  }
  void fill() {
    std::mt19937 engine(5);
    std::normal_distribution<float> normal;
    for (auto* x : {&q, &k, &v, &d_o})
      for (float& y : *x) y = normal(engine);
  }
  static Tensor rows(std::vector<float>& x, std::int64_t h) {
    return Tensor(x.data(), Type::f32, {std::int64_t(x.size()) / (h * dim), h, dim});
  }
  Inputs inputs() {
    Inputs in;
    in.q = rows(q, heads), in.k = rows(k, kv_heads), in.v = rows(v, kv_heads);
    return in;
  }
  Tensor lse_view() { return Tensor(lse.data(), Type::f32, {heads, std::int64_t(lse.size()) / heads}); }
  Outputs outputs() {
    Outputs out;
    out.o = rows(o, heads), out.lse = lse_view();
    return out;
  }
  Saved saved() { return {rows(o, heads), lse_view(), rows(d_o, heads), {}}; }
  Gradients gradients() { return {rows(dq, heads), rows(dk, kv_heads), rows(dv, kv_heads), {}, {}}; }
};

inline double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double most = a.size() == b.size() ? 0 : 1e9;
  for (std::size_t i = 0; i < a.size(); ++i) most = std::max(most, double(std::fabs(a[i] - b[i])));
  return most;
}

}  // namespace tessera
