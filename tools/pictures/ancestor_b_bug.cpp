// SPDX-License-Identifier: Apache-2.0
// Ancestor B's forgotten rescale: what it does to the weight of each tile, and to one row of O. See pictures.hpp.
#include <algorithm>
#include <cmath>

#include "cases/ancestor_b.hpp"
#include "tools/pictures/pictures.hpp"

namespace tessera::pictures {
namespace {

constexpr std::int64_t N = cases::AncestorB::N, D = cases::AncestorB::D, tile = 32, tiles = N / tile;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// One row by B's loop, which keeps O divided by l after every tile; `forget` leaves out the factor l_old. The last
// `tiles` numbers of the result are the weights that the tiles' keys have in O.
std::vector<double> row_of(const cases::AncestorB& b, std::int64_t i, bool forget) {
  std::vector<double> out(at(D + tiles), 0.0);
  double m = -1e300, l = 0;
  for (std::int64_t t = 0; t < tiles; ++t) {
    std::vector<double> P(at(tile), 0.0);
    for (std::int64_t j = 0; j < tile; ++j)
      for (std::int64_t d = 0; d < D; ++d)
        P[at(j)] += double(b.Q[at(i * D + d)]) * b.K[at((t * tile + j) * D + d)] / std::sqrt(double(D));
    const double m_tile = *std::max_element(P.begin(), P.end()), m_new = std::max(m, m_tile);
    double l_tile = 0;
    for (double& p : P) p = std::exp(p - m_tile), l_tile += p;
    const double old = std::exp(m - m_new), now = std::exp(m_tile - m_new), l_new = old * l + now * l_tile;
    for (double& x : out) x *= old * (forget ? 1 : l) / l_new;
    for (std::int64_t j = 0; j < tile; ++j)
      for (std::int64_t d = 0; d < D; ++d) out[at(d)] += now * P[at(j)] * b.V[at((t * tile + j) * D + d)] / l_new;
    out[at(D + t)] += now * l_tile / l_new;
    m = m_new, l = l_new;
  }
  return out;
}

}  // namespace

Sheet ancestor_b_bug() {
  const cases::AncestorB b = cases::ancestor_b();
  const std::vector<double> right = row_of(b, 0, false), wrong = row_of(b, 0, true);
  // The figures of docs/numerics.md; tests/cpu/ancestors_test.cpp pins the same ones.
  if (format("%.6g", wrong[0]) != "0.00981674" || format("%.6g", right[0]) != "0.016065")
    throw std::runtime_error("ancestor_b_bug: the figures do not come out");

  Sheet sheet(1000, 400, "Ancestor B's wrong output");
  const double top = 60, height = 240, left = 60;
  sheet.text(left, top - 30, "weight of each tile of 32 keys in row 0 of O", "start", colour::ink, 14, true);
  const auto y = [&](double share) { return top + height * (1 - share / 0.4); };
  for (double tick : {0.0, 0.1, 0.2, 0.3, 0.4}) {
    sheet.line({left, y(tick)}, {left + 330, y(tick)}, colour::grid);
    sheet.text(left - 8, y(tick) + 4, format("%.1f", tick), "end", colour::faint, 11);
  }
  double total = 0;
  for (std::int64_t t = 0; t < tiles; ++t) {
    const double x = left + 10 + double(t) * 82, good = right[at(D + t)], bad = wrong[at(D + t)];
    total += bad;
    sheet.rect(x, y(good), 32, y(0) - y(good), colour::blue);
    sheet.rect(x + 36, y(bad), 32, y(0) - y(bad), colour::red);
    sheet.text(x + 15, y(good) - 5, format("%.3f", good), "middle", colour::blue, 11);
    sheet.text(x + 53, y(bad) - 5, format(bad < 1e-3 ? "%.0e" : "%.3f", bad), "middle", colour::red, 11);
    sheet.text(x + 34, y(0) + 18, format("tile %lld", static_cast<long long>(t)), "middle", colour::faint, 12);
  }
  sheet.text(left, y(0) + 48, "right: the weights sum to 1.000", "start", colour::blue);
  sheet.text(left, y(0) + 68, format("wrong: they sum to %.3f; all but the last tile are lost", total), "start",
             colour::red);

  const double x0 = 480, width = 490, scale = 0.12;
  const auto v = [&](double value) { return top + height / 2 - value / scale * height / 2; };
  sheet.text(x0, top - 30, "row 0 of O, 32 dimensions", "start", colour::ink, 14, true);
  for (double tick : {-0.1, -0.05, 0.0, 0.05, 0.1}) {
    sheet.line({x0, v(tick)}, {x0 + width, v(tick)}, tick == 0 ? colour::faint : colour::grid);
    sheet.text(x0 - 8, v(tick) + 4, format("%.2f", tick), "end", colour::faint, 11);
  }
  for (std::int64_t d = 0; d < D; ++d) {
    const double x = x0 + (double(d) + 0.5) * width / double(D);
    sheet.line({x, v(right[at(d)])}, {x, v(wrong[at(d)])}, colour::grid, 1.5);
    sheet.dot({x, v(right[at(d)])}, 4, colour::blue);
    sheet.dot({x, v(wrong[at(d)])}, 4, colour::red);
  }
  double off = 0, norm = 0;
  for (std::size_t d = 0; d < at(D); ++d)
    off += (wrong[d] - right[d]) * (wrong[d] - right[d]), norm += right[d] * right[d];
  sheet.dot({x0 + 6, y(0) + 44}, 4, colour::blue);
  sheet.text(x0 + 16, y(0) + 48, format("right: %.6g, %.6g, %.6g ...", right[0], right[1], right[2]), "start",
             colour::blue);
  sheet.dot({x0 + 6, y(0) + 64}, 4, colour::red);
  sheet.text(x0 + 16, y(0) + 68, format("wrong: %.6g, %.6g, %.6g ...", wrong[0], wrong[1], wrong[2]), "start",
             colour::red);
  sheet.text(x0 + width, y(0) + 58, format("off by %.0f %% of the norm", 100 * std::sqrt(off / norm)), "end");
  return sheet;
}

}  // namespace tessera::pictures
