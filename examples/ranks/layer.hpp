// SPDX-License-Identifier: Apache-2.0
// A layer of attention whose tokens are spread over several ranks: every rank has all weights and its own rows of the
// input; Tessera brings it the keys and values of the others. Included by train.cpp (ranks as threads) and
// train_mpi.cpp (as processes), which differ in how numbers are summed over ranks.
#pragma once

#include <cmath>
#include <cstddef>
#include <functional>
#include <random>
#include <tessera/dist.hpp>
#include <vector>

constexpr std::int64_t tokens = 512, width = 16, heads = 2, dim = 8;  // heads * dim = width: square weights
using Numbers = std::vector<float>;
// Every rank calls it with as many numbers; afterwards each has the sums.
using SumOverRanks = std::function<void(Numbers&)>;

inline Numbers random_numbers(std::int64_t count, unsigned seed, float size) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0, size);
  Numbers out(static_cast<std::size_t>(count));
  for (float& x : out) x = normal(engine);
  return out;
}

// y [n,width] = x [n,width] w [width,width]; transposed: x w^T.
inline Numbers product(const Numbers& x, const Numbers& w, bool transposed = false) {
  Numbers y(x.size());
  for (std::size_t i = 0; i < x.size() / width; ++i)
    for (std::size_t a = 0; a < width; ++a)
      for (std::size_t b = 0; b < width; ++b)
        y[i * width + b] += x[i * width + a] * (transposed ? w[b * width + a] : w[a * width + b]);
  return y;
}

// Adds x^T y to a gradient.
inline void add_outer(float* gradient, const Numbers& x, const Numbers& y) {
  for (std::size_t i = 0; i < x.size() / width; ++i)
    for (std::size_t a = 0; a < width; ++a)
      for (std::size_t b = 0; b < width; ++b) gradient[a * width + b] += x[i * width + a] * y[i * width + b];
}

// The losses of some steps of gradient descent.
inline std::vector<double> train(const tessera::Communicator& communicator, const SumOverRanks& sum, int steps) {
  // Zigzag chunks: under a causal mask all ranks have as much to do.
  const tessera::Partition partition({.lengths = {tokens}, .ranks = communicator.size(), .align = 16});
  const tessera::Options options{.causal = true};
  tessera::DistPlan plan(communicator, partition,
                         {.query_heads = heads, .key_heads = heads, .head_dim = dim, .value_dim = dim}, options,
                         {.threads = 1});

  // This rank's rows of the input and of what the layer shall learn: each token the mean of itself and the one before.
  const Numbers all = random_numbers(tokens * width, 1, 1);
  Numbers x, target;
  for (const tessera_span& span : partition.spans(communicator.rank()))
    for (std::int64_t i = span.begin * width; i < span.end * width; ++i) {
      x.push_back(all[static_cast<std::size_t>(i)]);
      target.push_back((x.back() + (i < width ? 0 : all[static_cast<std::size_t>(i - width)])) / 2);
    }
  const std::int64_t rows = partition.rows(communicator.rank());
  const auto view = [&](Numbers& of) { return tessera::Tensor(of.data(), tessera::Type::f32, {rows, heads, dim}); };

  constexpr std::size_t square = width * width;
  std::vector<Numbers> w;  // of queries, keys, values and the output, on every rank
  for (unsigned i = 0; i < 4; ++i) w.push_back(random_numbers(square, 10 + i, 0.25f));
  std::vector<double> losses;
  for (int step = 0; step < steps; ++step) {
    Numbers q = product(x, w[0]), k = product(x, w[1]), v = product(x, w[2]), o(x.size()), lse(x.size() / dim);
    tessera::Inputs in;
    in.q = view(q), in.k = view(k), in.v = view(v);
    const tessera::Tensor lse_view(lse.data(), tessera::Type::f32, {heads, rows});
    plan.forward(in, {.o = view(o), .lse = lse_view});

    // Mean squared error, and its gradient.
    Numbers out = product(o, w[3]), sums(4 * square + 1);
    for (std::size_t i = 0; i < out.size(); ++i) {
      const float error = out[i] - target[i];
      sums[4 * square] += error * error / float(tokens * width);
      out[i] = 2 * error / float(tokens * width);
    }
    Numbers d_o = product(out, w[3], true), dq(x.size()), dk(x.size()), dv(x.size());
    plan.backward(in, {.o = view(o), .lse = lse_view, .d_o = view(d_o), .d_lse = {}},
                  {.dq = view(dq), .dk = view(dk), .dv = view(dv), .dbias = {}, .dsinks = {}});

    add_outer(&sums[0], x, dq), add_outer(&sums[square], x, dk), add_outer(&sums[2 * square], x, dv);
    add_outer(&sums[3 * square], o, out);
    sum(sums);  // gradients of the weights, and the loss
    for (std::size_t i = 0; i < 4 * square; ++i) w[i / square][i % square] -= 4.0f * sums[i];
    losses.push_back(double(sums[4 * square]));
  }
  return losses;
}

// Both have learned, and the same.
inline bool report(const std::vector<double>& one, const std::vector<double>& many, int ranks) {
  bool good = many.size() == one.size() && one.back() < 0.7 * one.front();
  for (std::size_t i = 0; i < one.size(); ++i) good = good && std::fabs(many[i] - one[i]) < 1e-4 * one[i];
  std::printf("loss on 1 rank: %.6f to %.6f, on %d: %.6f to %.6f: %s\n", one.front(), one.back(), ranks, many.front(),
              many.back(), good ? "the same" : "WRONG");
  return good;
}
