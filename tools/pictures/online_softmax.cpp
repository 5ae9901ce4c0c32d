// SPDX-License-Identifier: Apache-2.0
// One real row through online softmax, tile by tile: m, l, the partial O, and the error of the f32 state. See
// pictures.hpp.
#include <algorithm>
#include <cmath>

#include "cases/ancestor_b.hpp"
#include "tessera/tessera.hpp"
#include "tools/pictures/pictures.hpp"

namespace tessera::pictures {
namespace {

constexpr std::int64_t N = cases::AncestorB::N, D = cases::AncestorB::D, tile = 16, tiles = N / tile;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// The state (m, l, o) of docs/algorithm.md, in float or double.
template <class Number>
struct State {
  Number m = -std::numeric_limits<Number>::infinity(), l = 0, alpha = 0;
  std::vector<Number> o = std::vector<Number>(at(D));

  void add(const std::vector<double>& scores, const std::vector<float>& V, std::int64_t first) {
    Number top = m;
    for (std::int64_t j = first; j < first + tile; ++j) top = std::max(top, Number(scores[at(j)]));
    alpha = std::exp(m - top);
    l *= alpha, m = top;
    for (Number& x : o) x *= alpha;
    for (std::int64_t j = first; j < first + tile; ++j) {
      const Number e = std::exp(Number(scores[at(j)]) - m);
      l += e;
      for (std::int64_t d = 0; d < D; ++d) o[at(d)] += e * Number(V[at(j * D + d)]);
    }
  }
};

std::vector<double> scores_of(const cases::AncestorB& b, std::int64_t i) {
  std::vector<double> s(at(N), 0.0);
  for (std::int64_t j = 0; j < N; ++j) {
    for (std::int64_t d = 0; d < D; ++d) s[at(j)] += double(b.Q[at(i * D + d)]) * b.K[at(j * D + d)];
    s[at(j)] /= std::sqrt(double(D));
  }
  return s;
}

// How often the maximum rises from tile to tile.
int rises(const std::vector<double>& s) {
  double m = -1e300;
  int count = 0;
  for (std::int64_t t = 0; t < tiles; ++t) {
    const double top = *std::max_element(s.begin() + t * tile, s.begin() + (t + 1) * tile);
    if (t > 0 && top > m) ++count;
    m = std::max(m, top);
  }
  return count;
}

struct Library {
  std::vector<float> o = std::vector<float>(at(N * D)), lse = std::vector<float>(at(N));
};

Library library_result(cases::AncestorB b) {
  Library out;
  const auto view = [](std::vector<float>& x) { return Tensor(x.data(), Type::f32, {1, N, 1, D}); };
  Inputs in;
  in.q = view(b.Q), in.k = view(b.K), in.v = view(b.V);
  forward(in, {view(out.o), Tensor(out.lse.data(), Type::f32, {1, 1, N})});
  return out;
}

double distance(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t d = 0; d < a.size(); ++d) sum += (a[d] - b[d]) * (a[d] - b[d]);
  return std::sqrt(sum);
}

struct Axis {
  double left, width, top, height, low, high;
  double x(double share) const { return left + width * share; }
  double y(double value) const { return top + height * (high - value) / (high - low); }
};

void frame(Sheet& sheet, const Axis& a, const std::string& title, const std::vector<double>& ticks,
           const char* pattern) {
  sheet.text(a.left, a.top - 12, title, "start", colour::ink, 13, true);
  for (double tick : ticks) {
    sheet.line({a.left, a.y(tick)}, {a.left + a.width, a.y(tick)}, colour::grid);
    sheet.text(a.left - 8, a.y(tick) + 4, format(pattern, tick), "end", colour::faint, 11);
  }
  for (std::int64_t t = 0; t <= tiles; ++t)
    sheet.line({a.x(double(t) / tiles), a.top}, {a.x(double(t) / tiles), a.top + a.height}, colour::grid, 0.7);
}

}  // namespace

Sheet online_softmax() {
  const cases::AncestorB b = cases::ancestor_b();
  std::int64_t row = 0;
  for (std::int64_t i = 0; i < N; ++i)
    if (rises(scores_of(b, i)) > rises(scores_of(b, row))) row = i;
  const std::vector<double> s = scores_of(b, row);

  State<double> exact;
  State<float> single;
  std::vector<double> m, l, alpha, far, error;
  std::vector<std::vector<double>> partial;
  for (std::int64_t t = 0; t < tiles; ++t) {
    exact.add(s, b.V, t * tile), single.add(s, b.V, t * tile);
    m.push_back(exact.m), l.push_back(exact.l), alpha.push_back(exact.alpha);
    std::vector<double> o64(at(D)), o32(at(D));
    for (std::size_t d = 0; d < at(D); ++d) o64[d] = exact.o[d] / exact.l, o32[d] = double(single.o[d] / single.l);
    partial.push_back(o64), error.push_back(distance(o64, o32));
  }
  for (const auto& o : partial) far.push_back(distance(o, partial.back()));

  // The picture is of the real thing only if the library ends where this row ends.
  const Library library = library_result(b);
  const double lse = exact.m + std::log(exact.l);
  if (std::abs(lse - double(library.lse[at(row)])) > 1e-6) throw std::runtime_error("online_softmax: LSE differs");
  for (std::int64_t d = 0; d < D; ++d)
    if (std::abs(partial.back()[at(d)] - double(library.o[at(row * D + d)])) > 1e-6)
      throw std::runtime_error("online_softmax: O differs");

  if (*std::max_element(far.begin(), far.end()) > 0.8 || *std::max_element(error.begin(), error.end()) > 1e-7)
    throw std::runtime_error("online_softmax: a bar is taller than its panel");
  Sheet sheet(940, 640, "Online softmax of one row, tile by tile");
  const double left = 70, width = 600;
  const Axis scores{left, width, 50, 150, -1.3, 1.3}, sums{left, width, 250, 90, 0, 60},
      close{left, width, 390, 90, 0, 0.8}, wrong{left, width, 530, 70, 0, 1e-7};
  frame(sheet, scores,
        format("scores of query %lld against 128 keys, and the running maximum m", static_cast<long long>(row)),
        {-1, 0, 1}, "%g");
  for (std::int64_t j = 0; j < N; ++j) {
    const double x = scores.x((double(j) + 0.5) / N);
    sheet.line({x, scores.y(0)}, {x, scores.y(s[at(j)])}, colour::light, 2);
  }
  std::vector<Point> steps;
  for (std::size_t t = 0; t < m.size(); ++t) {
    steps.push_back({scores.x(double(t) / tiles), scores.y(m[t])});
    steps.push_back({scores.x(double(t + 1) / tiles), scores.y(m[t])});
  }
  sheet.polyline(steps, colour::orange, 2);

  frame(sheet, sums, "l: the sum so far, after alpha = exp(m_old - m) has rescaled it", {0, 30, 60}, "%g");
  frame(sheet, close, "how far o / l of the keys so far is from the row's final O (norm)", {0, 0.4, 0.8}, "%g");
  frame(sheet, wrong, "error of the f32 state against float64 over the same keys (norm)", {0, 5e-8, 1e-7}, "%.0e");
  for (std::size_t t = 0; t < m.size(); ++t) {
    const auto bar = [&](const Axis& a, double value, const char* fill) {
      sheet.rect(a.x((double(t) + 0.2) / tiles), a.y(value), a.width * 0.6 / tiles, a.y(0) - a.y(value), fill);
    };
    bar(sums, l[t], colour::blue), bar(close, far[t], colour::green), bar(wrong, error[t], colour::red);
    if (t > 0)
      sheet.text(sums.x((double(t) + 0.5) / tiles), sums.y(0) + 16, format("α %.3f", alpha[t]), "middle",
                 alpha[t] < 1 ? colour::orange : colour::faint, 11);
    sheet.text(wrong.x((double(t) + 0.5) / tiles), wrong.y(0) + 18, format("tile %zu", t), "middle", colour::faint, 11);
  }
  const double x = left + width + 30;
  const auto say = [&](double y, const std::string& words, const char* fill = colour::ink) {
    sheet.text(x, y, words, "start", fill, 13);
  };
  say(90, "m only rises"), say(108, format("at the end m = %.6f", m.back()), colour::orange);
  say(280, format("at the end l = %.6f", l.back()), colour::blue), say(298, format("LSE = m + log l = %.6f", lse));
  say(316, format("the library, in f32: %.6f", double(library.lse[at(row)])), colour::faint);
  say(420, "o is divided by l once, at the end"), say(438, format("O[0] = %.6f", partial.back()[0]), colour::green);
  say(456, format("the library, in f32: %.6f", double(library.o[at(row * D)])), colour::faint);
  say(560, "rounding does not build up"), say(578, format("at the end %.1e", error.back()), colour::red);
  return sheet;
}

}  // namespace tessera::pictures
