// SPDX-License-Identifier: Apache-2.0
// A whole problem with its numbers, its float64 answer, the answer of one device, and that of ranks, each of which
// gets its rows and gives back its rows. Included by the tests of tests/dist.
#pragma once

#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "dist/attention.hpp"
#include "dist/rows.hpp"
#include "dist/threads.hpp"

namespace tessera::dist {

struct Features {
  bool bias = false, mask = false, slopes = false, sinks = false, d_lse = false;
};

// Numbers of one tensor, [rows, heads, width], as a type holds them.
struct Numbers {
  Rows rows;
  Numbers() = default;
  Numbers(Type type, Int64 n, Int64 heads, Int64 width) : rows(type, n, heads, width) {}
  Int64 count() const { return rows.view.rows * rows.view.heads * rows.view.width; }
  double get(Int64 i) const {
    const std::byte* at = rows.view.data;
    switch (rows.view.type) {
      case Type::f64:
        return reinterpret_cast<const double*>(at)[i];
      case Type::f16:
        return double(widen(reinterpret_cast<const F16*>(at)[i]));
      case Type::bf16:
        return double(widen(reinterpret_cast<const BF16*>(at)[i]));
      case Type::u8:
        return double(reinterpret_cast<const unsigned char*>(at)[i]);
      default:
        return double(reinterpret_cast<const float*>(at)[i]);
    }
  }
  void set(Int64 i, double x) {
    std::byte* at = rows.view.data;
    switch (rows.view.type) {
      case Type::f64:
        reinterpret_cast<double*>(at)[i] = x;
        break;
      case Type::f16:
        reinterpret_cast<F16*>(at)[i] = narrow<F16>(float(x));
        break;
      case Type::bf16:
        reinterpret_cast<BF16*>(at)[i] = narrow<BF16>(float(x));
        break;
      case Type::u8:
        reinterpret_cast<unsigned char*>(at)[i] = static_cast<unsigned char>(x);
        break;
      default:
        reinterpret_cast<float*>(at)[i] = float(x);
    }
  }
  Tensor tokens() const {
    return Tensor(rows.view.data, rows.view.type, {rows.view.rows, rows.view.heads, rows.view.width});
  }
  Tensor numbers() const {  // [H,T]
    Tensor t(rows.view.data, rows.view.type, {rows.view.heads, rows.view.rows});
    t.strides = {rows.view.head_stride, rows.view.row_stride, 0, 0};
    return t;
  }
};

// What both passes write.
struct Answer {
  std::map<std::string, Numbers> of;
  std::string fault;
};

class World {
 public:
  Problem problem;
  Features features;
  Int64 tokens = 0, longest = 0;
  std::shared_ptr<Memory> (*memory)() = nullptr;  // of each rank; null: the host's

  World(Problem p, Features f, unsigned seed) : problem(std::move(p)), features(f) {
    for (const Int64 n : problem.lengths) tokens += n, longest = greater(longest, n);
    std::mt19937 engine(seed);
    std::normal_distribution<double> normal;
    const auto fill = [&](Numbers& x, Type type, Int64 heads, Int64 width) {
      x = Numbers(type, tokens, heads, width);
      for (Int64 i = 0; i < x.count(); ++i) x.set(i, normal(engine));
    };
    fill(q, problem.type, problem.Hq, problem.D), fill(k, problem.type, problem.Hk, problem.D);
    fill(v, problem.type, problem.Hk, problem.Dv), fill(d_o, problem.type, problem.Hq, problem.Dv);
    fill(d_lse, Type::f32, problem.Hq, 1);
    if (features.bias) fill(bias, problem.type, problem.Hq, longest);
    if (features.mask) {
      mask = Numbers(Type::u8, tokens, 1, longest);
      for (Int64 i = 0; i < mask.count(); ++i) mask.set(i, engine() % 4 != 0);
    }
    for (Int64 h = 0; h < problem.Hq; ++h)
      slopes.push_back(std::exp2(-float(h) - 3)), sinks.push_back(float(normal(engine)));
  }

  // float64 on the reference kernel, or one call of the library in the problem's type.
  Answer whole(bool reference) const {
    const Type type = reference ? Type::f64 : problem.type, wide = reference ? Type::f64 : Type::f32;
    const auto as = [&](const Numbers& x, Type to) {
      Numbers y(to, x.rows.view.rows, x.rows.view.heads, x.rows.view.width);
      for (Int64 i = 0; i < x.count(); ++i) y.set(i, x.get(i));
      return y;
    };
    const Numbers Q = as(q, type), K = as(k, type), V = as(v, type), dO = as(d_o, type), dLSE = as(d_lse, wide);
    std::vector<int> lengths{0};
    for (const Int64 n : problem.lengths) lengths.push_back(lengths.back() + int(n));
    Inputs in;
    in.q = Q.tokens(), in.k = K.tokens(), in.v = V.tokens();
    in.cu_seqlens_q = in.cu_seqlens_k = Tensor(lengths.data(), Type::i32, {Int64(lengths.size())});
    // Bias and mask of the whole are [sequences, heads, longest, longest].
    const auto squares = [&](const Numbers& x, Type to) {
      const Int64 heads = x.rows.view.heads;
      Numbers y(to, Int64(problem.lengths.size()) * heads * longest, 1, longest);
      Int64 row = 0;
      for (std::size_t b = 0; b < problem.lengths.size(); ++b)
        for (Int64 i = 0; i < problem.lengths[b]; ++i, ++row)
          for (Int64 h = 0; h < heads; ++h)
            for (Int64 j = 0; j < longest; ++j)
              y.set(((Int64(b) * heads + h) * longest + i) * longest + j, x.get((row * heads + h) * longest + j));
      return y;
    };
    Numbers B, M;
    const auto four = [&](const Numbers& x, Int64 heads) {
      return Tensor(x.rows.view.data, x.rows.view.type, {Int64(problem.lengths.size()), heads, longest, longest});
    };
    Numbers dB;  // zeros, which stay where there is no pair
    if (features.bias) B = squares(bias, type), dB = squares(as(bias, type), type), in.bias = four(B, problem.Hq);
    std::fill(dB.rows.memory.begin(), dB.rows.memory.end(), std::byte{});
    if (features.mask) M = squares(mask, Type::u8), in.mask = four(M, 1);
    in.slopes = slope_tensor(), in.sinks = sink_tensor();
    std::vector<double> wide_sinks(sinks.begin(), sinks.end());
    if (features.sinks && reference) in.sinks = Tensor(wide_sinks.data(), Type::f64, {problem.Hq});
    Answer answer = room(tokens, reference ? Type::f64 : problem.type, wide);
    std::vector<double> dsinks(sinks.size());
    Execution execution{.threads = 1};
    if (reference) execution.kernel = "reference";
    Options options = problem.options;
    tessera::forward(in, outputs(answer), options, execution);
    Gradients g = gradients(answer);
    if (features.sinks && !reference) g.dsinks = answer.of["dSinks"].numbers(), g.dsinks.ndim = 1;
    if (features.sinks && reference) g.dsinks = Tensor(dsinks.data(), Type::f64, {Int64(dsinks.size())});
    if (features.bias) g.dbias = four(dB, problem.Hq);
    tessera::backward(in, saved(answer, dO.tokens(), dLSE.numbers()), g, options, execution);
    if (features.bias) from_squares(dB, answer.of["dBias"]);
    if (features.sinks && reference)
      for (std::size_t h = 0; h < dsinks.size(); ++h) answer.of["dSinks"].set(Int64(h), dsinks[h]);
    return answer;
  }

  // One rank's part; `all` receives its rows.
  void rank(std::shared_ptr<Communicator> communicator, Sharing sharing, Answer& all) const {
    if (memory) sharing.memory = memory();
    const auto there = [&](std::initializer_list<Tensor*> tensors) {
      for (Tensor* t : tensors) t->device = sharing.memory->device();
    };
    Plan plan(communicator, problem, sharing);
    const std::vector<Span>& spans = sharing.partition.of[static_cast<std::size_t>(communicator->rank())];
    const Int64 n = sharing.partition.rows(communicator->rank());
    const auto local = [&](const Numbers& x) {
      Numbers y(x.rows.view.type, n, x.rows.view.heads, x.rows.view.width);
      if (x.count() > 0) move(x, y, spans, true);
      return y;
    };
    const Numbers Q = local(q), K = local(k), V = local(v), dO = local(d_o), dLSE = local(d_lse);
    Numbers B, M;
    Inputs in;
    in.q = Q.tokens(), in.k = K.tokens(), in.v = V.tokens();
    const auto pairs = [&](Numbers& x, const Numbers& from) {
      x = local(from);
      return pair_tensor(x);
    };
    if (features.bias) in.bias = pairs(B, bias);
    if (features.mask) in.mask = pairs(M, mask);
    in.slopes = slope_tensor(), in.sinks = sink_tensor();
    there({&in.q, &in.k, &in.v, &in.bias, &in.mask, &in.slopes, &in.sinks});
    Answer mine = room(n, problem.type, Type::f32);
    Outputs out = outputs(mine);
    there({&out.o, &out.lse});
    plan.forward(in, out);
    Gradients g = gradients(mine);
    Saved s = saved(mine, dO.tokens(), dLSE.numbers());
    if (features.sinks) g.dsinks = mine.of["dSinks"].numbers(), g.dsinks.ndim = 1;
    if (features.bias) g.dbias = pair_tensor(mine.of["dBias"]);
    there({&s.o, &s.lse, &s.d_o, &s.d_lse, &g.dq, &g.dk, &g.dv, &g.dbias, &g.dsinks});
    plan.backward(in, s, g);
    for (auto& [name, numbers] : mine.of) {
      if (name == "dSinks") {
        if (communicator->rank() == 0)
          for (Int64 i = 0; i < numbers.count(); ++i) all.of[name].set(i, numbers.get(i));
      } else {
        move(all.of[name], numbers, spans, false);
      }
    }
  }

  Answer empty() const { return room(tokens, problem.type, Type::f32); }

  // How many numbers of a rank's rows differ in their bits.
  int differing(const Numbers& a, const Numbers& b, const Partition& partition, int rank) const {
    const auto part = [&](const Numbers& all) {
      if (all.rows.view.rows != tokens) return all.rows.memory;  // of no row: the same on all ranks
      const std::vector<Span>& spans = partition.of[static_cast<std::size_t>(rank)];
      Numbers local(all.rows.view.type, partition.rows(rank), all.rows.view.heads, all.rows.view.width);
      move(all, local, spans, true);
      return local.rows.memory;
    };
    const Bytes x = part(a), y = part(b);
    int count = 0;
    for (std::size_t i = 0; i < x.size(); ++i) count += x[i] != y[i];
    return count;
  }

  // On threads. A rank that fails leaves its sentence.
  Answer ranks(const Sharing& sharing) const {
    Answer all = room(tokens, problem.type, Type::f32);
    std::vector<std::string> faults(static_cast<std::size_t>(sharing.partition.ranks()));
    run_ranks(sharing.partition.ranks(), [&](int r, std::shared_ptr<Communicator> communicator) {
      try {
        rank(communicator, sharing, all);
      } catch (const std::exception& error) {
        faults[static_cast<std::size_t>(r)] = error.what();
      }
    });
    for (const std::string& fault : faults)
      if (all.fault.empty()) all.fault = fault;
    return all;
  }

  // Root mean square error of a tensor against float64, relative to its own size.
  static double error(const Numbers& x, const Numbers& truth) {
    double sum = 0, size = 0;
    for (Int64 i = 0; i < truth.count(); ++i) {
      const double a = x.get(i), b = truth.get(i);
      if (std::isinf(b) && a == b) continue;
      sum += (a - b) * (a - b), size += b * b;
    }
    return size == 0 ? std::sqrt(sum) : std::sqrt(sum / size);
  }

  static bool same_bits(const Numbers& a, const Numbers& b) { return a.rows.memory == b.rows.memory; }

  // [1,Hq|1,T,M] of rows.
  static Tensor pair_tensor(const Numbers& x) {
    const RowView& view = x.rows.view;
    Tensor t(view.data, view.type, {1, view.heads, view.rows, view.width});
    t.strides = {0, view.head_stride, view.row_stride, 1};
    return t;
  }

 private:
  Numbers q, k, v, d_o, d_lse, bias, mask;
  std::vector<float> slopes, sinks;

  Tensor slope_tensor() const {
    return features.slopes ? Tensor(const_cast<float*>(slopes.data()), Type::f32, {problem.Hq}) : Tensor();
  }
  Tensor sink_tensor() const {
    return features.sinks ? Tensor(const_cast<float*>(sinks.data()), Type::f32, {problem.Hq}) : Tensor();
  }

  // [sequences, heads, longest, longest] as rows.
  void from_squares(const Numbers& from, Numbers& rows) const {
    Int64 row = 0;
    for (std::size_t b = 0; b < problem.lengths.size(); ++b)
      for (Int64 i = 0; i < problem.lengths[b]; ++i, ++row)
        for (Int64 h = 0; h < problem.Hq; ++h)
          for (Int64 j = 0; j < longest; ++j)
            rows.set((row * problem.Hq + h) * longest + j,
                     from.get(((Int64(b) * problem.Hq + h) * longest + i) * longest + j));
  }

  Answer room(Int64 n, Type type, Type wide) const {
    Answer a;
    a.of["O"] = Numbers(type, n, problem.Hq, problem.Dv), a.of["LSE"] = Numbers(wide, n, problem.Hq, 1);
    a.of["dQ"] = Numbers(type, n, problem.Hq, problem.D), a.of["dK"] = Numbers(type, n, problem.Hk, problem.D);
    a.of["dV"] = Numbers(type, n, problem.Hk, problem.Dv);
    if (features.sinks) a.of["dSinks"] = Numbers(wide, 1, problem.Hq, 1);
    if (features.bias) a.of["dBias"] = Numbers(type, n, problem.Hq, longest);
    for (auto& [name, x] : a.of)
      for (Int64 i = 0; i < x.count(); ++i) x.set(i, std::nan(""));
    return a;
  }
  Outputs outputs(Answer& a) const {
    Outputs out;
    out.o = a.of["O"].tokens(), out.lse = a.of["LSE"].numbers();
    return out;
  }
  Saved saved(Answer& a, const Tensor& dO, const Tensor& dLSE) const {
    Saved s{a.of["O"].tokens(), a.of["LSE"].numbers(), dO, {}};
    if (features.d_lse) s.d_lse = dLSE;
    return s;
  }
  Gradients gradients(Answer& a) const {
    return {a.of["dQ"].tokens(), a.of["dK"].tokens(), a.of["dV"].tokens(), {}, {}};
  }

  // Rows of these spans between a tensor of all tokens and one of a rank.
  void move(const Numbers& all, const Numbers& part, const std::vector<Span>& spans, bool to_part) const {
    const Int64 bytes = all.rows.view.row_stride * element_bytes(all.rows.view.type);
    Int64 row = 0;
    for (const Span& span : spans) {
      Int64 first = span.begin;
      for (Int64 b = 0; b < span.sequence; ++b) first += problem.lengths[static_cast<std::size_t>(b)];
      std::byte *a = all.rows.view.data + first * bytes, *b = part.rows.view.data + row * bytes;
      std::memcpy(to_part ? b : a, to_part ? a : b, static_cast<std::size_t>(span.rows() * bytes));
      row += span.rows();
    }
  }
};

}  // namespace tessera::dist
