// SPDX-License-Identifier: Apache-2.0
// A small language model with random weights, and the plain way to use it: no cache, all tokens again for every new
// one. Included by engine.hpp and serving.cpp. Every number of a row depends on that row alone, whoever its neighbours
// are.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <tessera/tessera.hpp>
#include <vector>

using Numbers = std::vector<float>;
using Tokens = std::vector<std::int32_t>;

// A row-major matrix that takes rows of `in` numbers to rows of `out`.
struct Linear {
  std::size_t in = 0, out = 0;
  Numbers weights;

  Numbers operator()(const Numbers& x) const {
    Numbers y(x.size() / in * out);
    for (std::size_t row = 0; row < x.size() / in; ++row)
      for (std::size_t i = 0; i < in; ++i)
        for (std::size_t o = 0; o < out; ++o) y[row * out + o] += x[row * in + i] * weights[i * out + o];
    return y;
  }
};

struct Layer {
  Linear q, k, v, o, up, down;
};

// Rows of queries, keys and values: [tokens, heads, dim], before rotation.
struct Projected {
  Numbers q, k, v;
};

class Model {
 public:
  static constexpr std::size_t layers = 2, vocabulary = 200, width = 64, hidden = 128;
  static constexpr std::int64_t heads = 4, kv_heads = 2, dim = 16, positions = 256;

  Numbers rotary_cos, rotary_sin;  // [positions, dim / 2]

  explicit Model(unsigned seed) {
    std::mt19937 random(seed);
    const auto linear = [&](std::size_t in, std::size_t out) {
      std::normal_distribution<float> normal(0, 1 / std::sqrt(static_cast<float>(in)));
      Linear made{in, out, Numbers(in * out)};
      for (float& x : made.weights) x = normal(random);
      return made;
    };
    embedding = linear(vocabulary, width);
    for (float& x : embedding.weights) x *= std::sqrt(static_cast<float>(vocabulary));
    for (std::size_t n = 0; n < layers; ++n)
      stack.push_back({linear(width, heads * dim), linear(width, kv_heads * dim), linear(width, kv_heads * dim),
                       linear(heads * dim, width), linear(width, hidden), linear(hidden, width)});
    head = linear(width, vocabulary);
    for (std::int64_t position = 0; position < positions; ++position)
      for (std::int64_t pair = 0; pair < dim / 2; ++pair) {
        const double angle = static_cast<double>(position) * std::pow(10000.0, -2.0 * static_cast<double>(pair) / dim);
        rotary_cos.push_back(static_cast<float>(std::cos(angle)));
        rotary_sin.push_back(static_cast<float>(std::sin(angle)));
      }
  }

  // One row of `width` numbers for each token.
  Numbers embed(const Tokens& tokens) const {
    Numbers x;
    for (const std::int32_t token : tokens) {
      const auto row =
          embedding.weights.begin() + static_cast<std::ptrdiff_t>(token) * static_cast<std::ptrdiff_t>(width);
      x.insert(x.end(), row, row + static_cast<std::ptrdiff_t>(width));
    }
    return x;
  }

  Projected project(std::size_t layer, const Numbers& x) const {
    const Numbers y = normalised(x);
    return {stack[layer].q(y), stack[layer].k(y), stack[layer].v(y)};
  }

  // What follows the attention, whose output is o [tokens, heads, dim]; x becomes the next layer's input.
  void finish(std::size_t layer, Numbers& x, const Numbers& o) const {
    add(x, stack[layer].o(o));
    Numbers inner = stack[layer].up(normalised(x));
    for (float& value : inner) value /= 1 + std::exp(-value);  // SiLU
    add(x, stack[layer].down(inner));
  }

  // Greedy sampling: the token with the largest logit, of the row's last hidden state.
  std::int32_t next_token(const Numbers& x, std::size_t row) const {
    const auto first = x.begin() + static_cast<std::ptrdiff_t>(row * width);
    const Numbers logits = head(normalised(Numbers(first, first + static_cast<std::ptrdiff_t>(width))));
    std::size_t best = 0;
    for (std::size_t token = 1; token < logits.size(); ++token)
      if (logits[token] > logits[best]) best = token;
    return static_cast<std::int32_t>(best);
  }

 private:
  static Numbers normalised(const Numbers& x) {  // RMSNorm
    Numbers y(x.size());
    for (std::size_t row = 0; row < x.size() / width; ++row) {
      float sum = 1e-6f;
      for (std::size_t i = 0; i < width; ++i) sum += x[row * width + i] * x[row * width + i];
      const float factor = 1 / std::sqrt(sum / width);
      for (std::size_t i = 0; i < width; ++i) y[row * width + i] = x[row * width + i] * factor;
    }
    return y;
  }

  static void add(Numbers& x, const Numbers& y) {
    for (std::size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  }

  Linear embedding, head;
  std::vector<Layer> stack;
};

// Rotary embedding by hand: token t of [tokens, heads, dim] is at position t; pairs lie dim / 2 apart.
inline void rotate(const Model& model, Numbers& x, std::int64_t heads) {
  constexpr std::int64_t half = Model::dim / 2;
  for (std::size_t row = 0; row < x.size() / Model::dim; ++row)
    for (std::int64_t pair = 0; pair < half; ++pair) {
      const auto angle = static_cast<std::size_t>(static_cast<std::int64_t>(row) / heads * half + pair);
      const float cos = model.rotary_cos[angle], sin = model.rotary_sin[angle];
      float &a = x[row * Model::dim + static_cast<std::size_t>(pair)], &b = (&a)[half];
      const float x_a = a, x_b = b;
      a = x_a * cos - x_b * sin, b = x_a * sin + x_b * cos;
    }
}

// The plain way: the prompt and `count` further tokens, each from attention over all tokens before it, made anew.
inline Tokens generate_without_cache(const Model& model, Tokens tokens, std::size_t count) {
  using tessera::Tensor, tessera::Type;
  for (; count > 0; --count) {
    const auto n = static_cast<std::int64_t>(tokens.size());
    Numbers x = model.embed(tokens);
    for (std::size_t layer = 0; layer < Model::layers; ++layer) {
      Projected p = model.project(layer, x);
      rotate(model, p.q, Model::heads), rotate(model, p.k, Model::kv_heads);
      Numbers o(p.q.size());
      tessera::Inputs in;
      in.q = Tensor(p.q.data(), Type::f32, {1, n, Model::heads, Model::dim});
      in.k = Tensor(p.k.data(), Type::f32, {1, n, Model::kv_heads, Model::dim});
      in.v = Tensor(p.v.data(), Type::f32, {1, n, Model::kv_heads, Model::dim});
      tessera::forward(in, {.o = Tensor(o.data(), Type::f32, {1, n, Model::heads, Model::dim})}, {.causal = true});
      model.finish(layer, x, o);
    }
    tokens.push_back(model.next_token(x, tokens.size() - 1));
  }
  return tokens;
}
