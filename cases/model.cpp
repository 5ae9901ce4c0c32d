// SPDX-License-Identifier: Apache-2.0
// The rounding model: straightforward float64 loops, one query row at a time, forward and backward together. Part of
// tessera_cases; see model.hpp. It shares no code with src/, so that it checks the reference kernel too. Implements
// docs/algorithm.md's formulas and docs/numerics.md, "The rule".
#include "cases/model.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <mutex>
#include <span>
#include <thread>
#include <utility>

#include "cases/model_parts.hpp"
#include "tessera/tessera.hpp"

namespace tessera::cases {

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// One key that a row sees.
struct Pair {
  std::int64_t j;
  double s, c, t;     // score, sum of absolute values behind it, s_cap/softcap
  double p, w, keep;  // probability, its weight in A, dropout's factor
  double dOv = 0;     // dO . v, of the backward pass
};

class Model {
 public:
  explicit Model(const CaseData& source) :
      data(source), c(source.spec), q(source.q.values()), k(source.keys()), v(source.values()), qv(source.qv.values()),
      trees(source.tree_mask.values()), positions(source.positions.values()), d_o(source.d_o.values()),
      bias(source.bias.values()), mask(source.mask.values()), slopes(source.slopes.values()),
      sinks(source.sinks.values()), d_lse(source.d_lse.values()), bias_index(source.bias), mask_index(source.mask),
      k_squares(squares(k, c.D)), v_squares(squares(v, c.dim_v())), o(source.o.elements(), c.dim_v()),
      lse(source.lse.elements(), 1), dq(source.q.elements(), c.D), dk(source.k.elements(), c.D),
      dv(source.v.elements(), c.dim_v()), dbias(source.bias.elements(), 1), dsinks(source.sinks.elements(), 1),
      dbias_spread(dbias.variance), dsinks_spread(dsinks.variance) {
    std::fill(o.bound.begin(), o.bound.end(), std::nan(""));
    std::fill(lse.bound.begin(), lse.bound.end(), std::nan(""));
  }

  void run() {
    std::atomic<std::int64_t> next{0};
    const std::int64_t items = c.batches() * c.Hq;
    const auto work = [&] {
      for (std::int64_t item; (item = next++) < items;) head(item / c.Hq, item % c.Hq);
    };
    std::vector<std::thread> others;
    for (unsigned n = 1; n < std::min<unsigned>(std::thread::hardware_concurrency(), 8); ++n) others.emplace_back(work);
    work();
    for (std::thread& other : others) other.join();
    // Identical rows have identical rounding errors, which add up linearly instead of averaging out. The same holds for
    // rows whose scores are all about 0.
    const bool copies = c.style == Style::broadcast || c.endless_k > 0 || c.distribution == Distribution::structured ||
                        c.distribution == Distribution::identity;
    if (!copies && c.scale() != 0 && c.distribution != Distribution::small) return;
    const auto squared = [](double x) { return x * x; };
    std::transform(dbias_spread.begin(), dbias_spread.end(), dbias.variance.begin(), squared);
    std::transform(dsinks_spread.begin(), dsinks_spread.end(), dsinks.variance.begin(), squared);
    // All errors are then one random draw. Its worst case is half an ulp: sqrt(3) times the standard deviation of a
    // uniform error.
    for (Sum* sum : {&o, &dq, &dk, &dv, &dbias, &dsinks})
      for (double& x : sum->variance) x *= 3;
  }

  const CaseData& data;
  const Case& c;
  const Values q, k, v, qv, trees, positions, d_o, bias, mask, slopes, sinks, d_lse;
  const ScoreIndex bias_index, mask_index;
  const Values k_squares, v_squares;
  Sum o, lse, dq, dk, dv, dbias, dsinks;

 private:
  Values dbias_spread, dsinks_spread;  // sums of standard deviations; `variance` sums their squares

  // A contribution to one element of dBias.
  struct BiasTerm {
    std::size_t element;
    double dS, bound, variance, lost;
  };
  // What one (b, h) adds to sums that several share.
  struct Head {
    std::int64_t b, h, hk;
    const Sequence& s;
    double sink;
    Sum dk, dv;
    double dsink = 0, dsink_bound = 0, dsink_variance = 0, dsink_lost = 0;
    double dsink_spread = 0;  // sum of standard deviations
    std::vector<BiasTerm> dbias{};
  };
  // One query of it.
  struct Row {
    std::int64_t i;
    std::size_t q, o, lse;  // where its elements begin
    std::vector<Pair> pairs;
    std::vector<std::pair<double, const Pair*>> by_size{};  // their probabilities, see sort_pairs
    double LSE = -infinity;
    double delta_variance = 0, delta_lost = 0;  // of the roundings, and of the underflow, that reach delta
  };

  std::size_t key(const Head& x, std::int64_t j) const { return at((x.s.row_k + j) * c.Hk + x.hk); }
  const double* k_row(const Head& x, std::int64_t j) const { return &k[key(x, j) * at(c.D)]; }
  const double* v_row(const Head& x, std::int64_t j) const { return &v[key(x, j) * at(c.dim_v())]; }

  double k_norm(const Head& x, std::int64_t j) const { return std::sqrt(k_squares[key(x, j)]); }
  double v_norm(const Head& x, std::int64_t j) const { return std::sqrt(v_squares[key(x, j)]); }

  // i + off, or what the caller says.
  std::int64_t place(const Head& x, std::int64_t i) const {
    return positions.empty() ? i + x.s.off : static_cast<std::int64_t>(positions[at(x.s.row_q + i)]);
  }
  // Bit t of query i.
  bool on_its_branch(const Head& x, std::int64_t i, std::int64_t t) const {
    const std::int64_t words = data.tree_mask.size(data.tree_mask.tensor().ndim - 1);
    const auto word = static_cast<std::int64_t>(trees[at((x.s.row_q + i) * words + t / 32)]);
    return static_cast<std::uint32_t>(word) >> (t % 32) & 1;
  }

  bool visible(const Head& x, std::int64_t i, std::int64_t j) const {
    // The distance is far inside 64 bits; its sum with a window, which may be any number, is not.
    const std::int64_t ahead = j + c.options.col0 - (place(x, i) + c.options.row0), t = j - (x.s.Nk - x.s.Nq);
    const bool in_tree = c.tree != Tree::none && t >= 0;
    if (in_tree ? !on_its_branch(x, i, t) : c.options.causal && ahead > 0) return false;
    if (c.options.window_left >= 0 && -ahead > c.options.window_left) return false;
    if (c.options.window_right >= 0 && ahead > c.options.window_right) return false;
    return mask.empty() || mask[mask_index(x.b, x.h, i, j)] != 0;
  }

  std::vector<Pair> scores(const Head& x, const Row& row) const {
    const double scale = c.scale(), softcap = c.options.softcap;
    std::vector<Pair> pairs;
    pairs.reserve(at(x.s.Nk));
    for (std::int64_t j = 0; j < x.s.Nk; ++j) {
      if (!visible(x, row.i, j)) continue;
      Dots qk = dots(&q[row.q], k_row(x, j), c.D);
      if (c.qv) qk = qk + dots(&qv[row.o], v_row(x, j), c.dim_v());
      Pair pair{.j = j, .s = scale * qk.sum, .c = std::abs(scale) * qk.absolute, .t = 0, .p = 0, .w = 0, .keep = 1};
      if (softcap > 0) pair.t = std::tanh(pair.s / softcap), pair.s = softcap * pair.t;
      if (!slopes.empty()) {
        const double slope = slopes[at(c.slopes == Slopes::per_batch_head ? x.b * c.Hq + x.h : x.h)];
        const auto distance = static_cast<double>(std::abs(place(x, row.i) + c.options.row0 - j - c.options.col0));
        pair.s -= slope * distance, pair.c += std::abs(slope) * distance;
      }
      if (!bias.empty()) {
        const double value = bias[bias_index(x.b, x.h, row.i, j)];
        pair.s += value, pair.c += std::abs(value);
      }
      if (pair.s != -infinity) pairs.push_back(pair);
    }
    return pairs;
  }

  void softmax(const Head& x, Row& row) const {
    double m = x.sink, sum = 0, mean_c = 0;
    for (const Pair& pair : row.pairs) m = std::max(m, pair.s);
    for (const Pair& pair : row.pairs) sum += std::exp(pair.s - m);
    if (x.sink != -infinity) sum += std::exp(x.sink - m);
    row.LSE = m == -infinity ? -infinity : m + std::log(sum);
    for (Pair& pair : row.pairs) pair.p = std::exp(pair.s - row.LSE), mean_c += pair.p * pair.c;
    if (x.sink != -infinity) mean_c += std::exp(x.sink - row.LSE) * std::abs(x.sink);
    const Options& opt = c.options;
    for (Pair& pair : row.pairs) {
      pair.w = pair.p * std::max(1.0, pair.c + mean_c);
      if (opt.dropout <= 0) continue;
      const bool keep = kept(opt.seed, opt.seed_offset, opt.dropout, x.b + opt.batch0, x.h + opt.head0,
                             row.i + opt.row0, pair.j + opt.col0);
      pair.keep = keep ? 1 / (1 - std::round(65536 * opt.dropout) / 65536) : 0;
    }
  }

  void head(std::int64_t b, std::int64_t h) {
    const Sequence& s = data.sequences[at(b)];
    const std::int64_t Nk = c.backward ? s.Nk : 0, hk = h / (c.Hq / c.Hk);
    Head x{.b = b,
           .h = h,
           .hk = hk,
           .s = s,
           .sink = sinks.empty() ? -infinity : sinks[at(h)],
           .dk = Sum(Nk * c.D, c.D),
           .dv = Sum(Nk * c.dim_v(), c.dim_v())};
    for (std::int64_t i = 0; i < s.Nq; ++i) query(x, i);
    const std::lock_guard lock(mutex);
    dk.add(x.dk, s.row_k * c.Hk + hk, c.Hk);
    dv.add(x.dv, s.row_k * c.Hk + hk, c.Hk);
    for (const BiasTerm& term : x.dbias) {
      dbias.model[term.element] += term.dS, dbias.bound[term.element] += term.bound;
      dbias.variance[term.element] += term.variance, dbias_spread[term.element] += std::sqrt(term.variance);
      dbias.lost[term.element] += term.lost;
    }
    if (sinks.empty()) return;
    dsinks.model[at(h)] += x.dsink, dsinks.bound[at(h)] += x.dsink_bound;
    dsinks.lost[at(h)] += x.dsink_lost;
    dsinks.variance[at(h)] += x.dsink_variance, dsinks_spread[at(h)] += x.dsink_spread;
  }

  void query(Head& x, std::int64_t i) {
    const std::int64_t Dv = c.dim_v(), number = (x.s.row_q + i) * c.Hq + x.h;
    Row row{.i = i,
            .q = at(number * c.D),
            .o = at(number * Dv),
            .lse = at(x.s.lse_first + x.h * x.s.lse_head + i),
            .pairs = {}};
    row.pairs = scores(x, row);
    softmax(x, row);

    double largest_c = std::max(1.0, x.sink == -infinity ? 0.0 : std::abs(x.sink));
    std::fill_n(&o.bound[row.o], Dv, 0.0);
    for (const Pair& pair : row.pairs) {
      largest_c = std::max(largest_c, pair.c);
      const double P = pair.p * pair.keep;
      add_scaled(&o.model[row.o], &o.bound[row.o], v_row(x, pair.j), round_to(c.type, P), pair.w * pair.keep, Dv);
      o.lost[at(number)] += pair.keep * (lost_of(pair.p) * v_norm(x, pair.j) + lost_product * std::sqrt(Dv));
    }
    sort_pairs(row);
    for_alike(row, [&](double lost, std::span<const Pair* const> alike) {
      if (alike.size() == 1) {
        o.variance[at(number)] += lost * v_squares[key(x, alike[0]->j)];
        return;
      }
      Values sum(at(Dv), 0.0);
      for (const Pair* pair : alike)
        for (std::int64_t d = 0; d < Dv; ++d) sum[at(d)] += v_row(x, pair->j)[d];
      o.variance[at(number)] += lost * square(sum.data(), Dv);
    });
    for (std::size_t d = row.o; d < row.o + at(Dv); ++d) {
      const double lost = variance(data.o.type(), o.model[d]);
      o.variance[at(number)] += lost, row.delta_variance += lost * d_o[d] * d_o[d];
      o.model[d] = round_to(data.o.type(), o.model[d]);
    }
    lse.model[row.lse] = round_to(data.lse.type(), row.LSE), lse.bound[row.lse] = largest_c;
    if (c.backward && row.LSE != -infinity) query_backward(x, row);
  }

  // Correlated rounding errors: probabilities of a row that differ by less than an eighth of an ulp (those of equal
  // scores, say) are rounded alike, and their errors add up linearly. Sorts those that are rounded by eighths.
  void sort_pairs(Row& row) const {
    row.by_size.reserve(row.pairs.size());
    for (const Pair& pair : row.pairs) {
      const double P = pair.p * pair.keep, unit = spacing(c.type, P);
      if (variance(c.type, P) > 0) row.by_size.emplace_back(std::floor(P / unit * 8) * unit, &pair);
    }
    std::stable_sort(row.by_size.begin(), row.by_size.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
  }
  // Calls visit(variance of one, the group) for those that are rounded alike.
  template <class Visit>
  void for_alike(const Row& row, Visit visit) const {
    std::vector<const Pair*> alike;
    for (std::size_t n = 0; n < row.by_size.size(); ++n) {
      alike.push_back(row.by_size[n].second);
      if (n + 1 < row.by_size.size() && row.by_size[n + 1].first == row.by_size[n].first) continue;
      visit(variance(c.type, alike[0]->p * alike[0]->keep), std::span<const Pair* const>(alike));
      alike.clear();
    }
  }

  void query_backward(Head& x, Row& row) {
    const std::int64_t Dv = c.dim_v(), D = c.D;
    const double scale = c.scale(), dO_square = square(&d_o[row.o], Dv), q_square = square(&q[row.q], D);
    double delta = 0, delta_bound = 0;
    for (std::size_t d = row.o; d < row.o + at(Dv); ++d)
      delta += d_o[d] * o.model[d], delta_bound += std::abs(d_o[d]) * o.bound[d];
    if (!d_lse.empty()) delta -= d_lse[row.lse], delta_bound += std::abs(d_lse[row.lse]);

    const double dO_norm = std::sqrt(dO_square), q_norm = std::sqrt(q_square), factor = std::max(1.0, std::abs(scale));
    const double root_D = std::sqrt(D), root_Dv = std::sqrt(Dv), width = static_cast<double>(Dv);
    row.delta_lost = dO_norm * o.lost[row.o / at(Dv)] + width * lost_product;
    double &dq_variance = dq.variance[row.q / at(D)], &dq_lost = dq.lost[row.q / at(D)];
    Values slope(at(D), 0.0);  // of dQ_i as a function of delta_i
    for (Pair& pair : row.pairs) {
      const std::int64_t j = pair.j;
      const Dots dOv = dots(&d_o[row.o], v_row(x, j), Dv);
      double dS = pair.p * (pair.keep * dOv.sum - delta);
      double dS_bound = pair.w * (pair.keep * dOv.absolute + delta_bound);
      const double dS_lost = lost_of(pair.p) * (pair.keep * dOv.absolute + delta_bound) +
                             pair.p * (pair.keep * width * lost_product + row.delta_lost) + lost_product;
      if (!bias.empty()) x.dbias.push_back({bias_index(x.b, x.h, row.i, j), dS, dS_bound, 0, dS_lost});
      const double slack = c.options.softcap > 0 ? 1 - pair.t * pair.t : 1;
      if (c.options.softcap > 0) dS *= slack, dS_bound *= 1 + pair.t * pair.t;
      const double P_variance = variance(c.type, pair.p * pair.keep);
      const double dS_variance = variance(c.type, dS) * scale * scale;
      dS = scale * round_to(c.type, dS), dS_bound *= std::abs(scale);

      add_scaled(&x.dv.model[at(j * Dv)], &x.dv.bound[at(j * Dv)], &d_o[row.o], round_to(c.type, pair.p * pair.keep),
                 pair.w * pair.keep, Dv);
      add_scaled(&dq.model[row.q], &dq.bound[row.q], k_row(x, j), dS, dS_bound, D);
      add_scaled(&x.dk.model[at(j * D)], &x.dk.bound[at(j * D)], &q[row.q], dS, dS_bound, D);
      for (std::int64_t d = 0; d < D; ++d) slope[at(d)] += scale * pair.p * slack * k_row(x, j)[d];
      pair.dOv = dOv.sum;
      x.dv.variance[at(j)] += P_variance * dO_square;
      dq_variance += dS_variance * k_squares[key(x, j)];
      x.dk.variance[at(j)] += dS_variance * q_square;
      x.dv.lost[at(j)] += pair.keep * (lost_of(pair.p) * dO_norm + lost_product * root_Dv);
      dq_lost += factor * (dS_lost * k_norm(x, j) + lost_product * root_D);
      x.dk.lost[at(j)] += factor * (dS_lost * q_norm + lost_product * root_D);
    }
    for_alike(row, [&](double lost, std::span<const Pair* const> alike) {
      double sum = 0;
      for (const Pair* pair : alike) sum += pair->dOv;
      row.delta_variance += lost * sum * sum;
    });
    dq_variance += row.delta_variance * square(slope.data(), D);
    spread_delta(x, row, scale * scale * q_square);
    if (x.sink != -infinity) sink_backward(x, row, delta, delta_bound);
  }

  // An error of delta_i shifts every dS of its row in the same direction: where one bias is broadcast over keys the
  // errors add up linearly.
  void spread_delta(Head& x, const Row& row, double q_square) const {
    double sum = 0;
    for (const Pair& pair : row.pairs) {
      const double slack = c.options.softcap > 0 ? 1 - pair.t * pair.t : 1, ds = pair.p * slack;
      x.dk.variance[at(pair.j)] += row.delta_variance * ds * ds * q_square;
      sum += pair.p;
      if (!bias.empty() && data.bias.size(3) > 1)
        x.dbias.push_back({bias_index(x.b, x.h, row.i, pair.j), 0, 0, pair.p * pair.p * row.delta_variance, 0});
    }
    if (!bias.empty() && data.bias.size(3) == 1)
      x.dbias.push_back({bias_index(x.b, x.h, row.i, 0), 0, 0, sum * sum * row.delta_variance, 0});
  }

  void sink_backward(Head& x, const Row& row, double delta, double delta_bound) const {
    const double p = std::exp(x.sink - row.LSE);
    double mean_c = p * std::abs(x.sink);
    for (const Pair& pair : row.pairs) mean_c += pair.p * pair.c;
    x.dsink -= p * delta;
    x.dsink_bound += p * std::max(1.0, std::abs(x.sink) + mean_c) * delta_bound;
    x.dsink_lost += lost_of(p) * delta_bound + p * row.delta_lost + lost_product;
    x.dsink_variance += p * p * row.delta_variance, x.dsink_spread += p * std::sqrt(row.delta_variance);
  }

  std::mutex mutex;
};

Values rounded(const Values& x, Type type) {
  Values y(x.size());
  std::transform(x.begin(), x.end(), y.begin(), [&](double value) { return round_to(type, value); });
  return y;
}

// `output` may be absent: then its type does not matter, for nobody compares it.
Expected finished(const Buffer& output, const Buffer& exact, const Sum& sum, bool accumulate) {
  Expected e{.exact = exact.values(), .model = sum.model, .bound = sum.bound, .initial = {}};
  if (accumulate && output) {
    e.initial = output.values();
    for (std::size_t n = 0; n < e.exact.size(); ++n) {
      e.exact[n] += e.initial[n], e.model[n] += e.initial[n];
      if (e.bound[n] != 0) e.bound[n] += std::abs(e.initial[n]);
    }
  }
  if (!output) return e;
  double total = 0, largest = 0, lost = 0;
  for (std::size_t r = 0; r < sum.variance.size(); ++r) {
    double row = sum.variance[r];
    for (std::size_t n = r * at(sum.width); n < (r + 1) * at(sum.width); ++n)
      if (e.bound[n] > 0) row += variance(output.type(), e.model[n]);  // NaN: never written
    total += row, largest = std::max(largest, row);
    if (std::isfinite(sum.lost[r])) lost += sum.lost[r] * sum.lost[r];
  }
  e.underflow = std::sqrt(lost);
  e.rounding = std::sqrt(total) + 3 * std::sqrt(largest);
  e.model = rounded(e.model, output.type());
  return e;
}

}  // namespace

Expectation expect(const CaseData& data) {
  const CaseData wide = widened(data);
  const Execution reference{.kernel = "reference"};
  forward(wide.inputs(), wide.outputs(), wide.options(), reference);
  if (data.spec.backward) backward(wide.inputs(), wide.saved(), wide.gradients(), wide.options(), reference);

  Model model(data);
  model.run();
  const bool accumulate = data.spec.options.accumulate;
  return {.o = finished(data.o, wide.o, model.o, false),
          .lse = finished(data.lse, wide.lse, model.lse, false),
          .dq = finished(data.dq, wide.dq, model.dq, accumulate),
          .dk = finished(data.dk, wide.dk, model.dk, accumulate),
          .dv = finished(data.dv, wide.dv, model.dv, accumulate),
          .dbias = finished(data.dbias, wide.dbias, model.dbias, accumulate),
          .dsinks = finished(data.dsinks, wide.dsinks, model.dsinks, accumulate)};
}

}  // namespace tessera::cases
