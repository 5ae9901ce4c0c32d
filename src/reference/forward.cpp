// SPDX-License-Identifier: Apache-2.0
// The forward pass, in float64, one query row at a time: docs/algorithm.md, equations (1) to (6).
#include <algorithm>
#include <vector>

#include "core/parallel.hpp"
#include "math/softmax.hpp"
#include "reference/kernel.hpp"
#include "reference/scores.hpp"

namespace tessera::reference {
namespace {

// What one head of one sequence is computed in.
struct Room {
  Matrix Q, K, V, Qv;
  std::vector<double> S, o;  // of one row

  Room(const Problem& p, const Longest& longest) :
      Q(longest.nq, p.D), K(longest.nk, p.D), V(longest.nk, p.Dv), Qv(p.qv ? longest.nq : 0, p.Dv),
      S(static_cast<std::size_t>(longest.nk)), o(static_cast<std::size_t>(p.Dv)) {}
};

// A row between calls, docs/algorithm.md, "Carried state": m in units of log2, o without dropout's factor r.
struct StateRows {
  TokenRows o;
  RowNumbers m, l;

  StateRows(const State& state, const Problem& p, const Sequence& s) :
      o(token_rows(state.o, p, s.b, s.q_begin)), m(row_numbers(state.m, p, s)), l(row_numbers(state.l, p, s)) {}
  explicit operator bool() const { return bool(m); }
};

void forward_head(const Problem& p, const Call& call, const Sequence& s, std::int64_t h, Room& room) {
  const Head head(p, call, s, h);
  const std::int64_t kv = h / p.heads_per_kv();
  auto& [Q, K, V, Qv, S, o] = room;
  Q.load(token_rows(call.inputs.q, p, s.b, s.q_begin), h, s.nq);
  K.load(keys_of(p, call, s, kv), s.nk);
  V.load(values_of(p, call, s, kv), s.nk);
  if (p.qv) Qv.load(token_rows(call.inputs.qv, p, s.b, s.q_begin), h, s.nq);
  const TokenRows O = token_rows(call.outputs.o, p, s.b, s.q_begin);
  const RowNumbers LSE = row_numbers(call.outputs.lse, p, s);
  const StateRows from(call.inputs.state, p, s), to(call.outputs.state, p, s);
  const double r = dropout_scale(head.threshold);

  for (std::int64_t i = 0; i < s.nq; ++i) {
    const double l_before = from ? from.l.get(i, h) : 0;
    const double m_before = l_before == 0 ? -infinity : from.m.get(i, h) * ln2<double>;
    double m = head.sink;
    if (m_before > m || m_before != m_before) m = m_before;
    for (std::int64_t j = 0; j < s.nk; ++j) {
      double& x = S[static_cast<std::size_t>(j)];
      const double second = p.qv ? dot(Qv[i], V[j], p.Dv) : 0;
      x = head.visible(i, j) ? head.score(head.capped(dot(Q[i], K[j], p.D) + second, i, j), i, j) : -infinity;
      if (x > m || x != x) m = x;
    }
    if (to) {  // everything is relative to the m that is stored
      to.m.set(i, h, m * log2e<double>);
      m = to.m.get(i, h) * ln2<double>;
    }
    double l = m == -infinity ? 0 : std::exp(head.sink - m);
    std::fill(o.begin(), o.end(), 0.0);
    if (l_before != 0) {
      const double alpha = std::exp(m_before - m);
      l += alpha * l_before;
      for (std::int64_t d = 0; d < p.Dv; ++d)
        o[static_cast<std::size_t>(d)] = alpha * r * load_element(from.o.at(i, h), from.o.type, d);
    }
    for (std::int64_t j = 0; j < s.nk; ++j) {
      const double x = S[static_cast<std::size_t>(j)];
      if (x == -infinity) continue;  // invisible, or a score of -inf: either way no part of the sum
      const double e = std::exp(x - m);
      l += e;
      const double z = head.keep(i, j);
      if (z == 0) continue;
      for (std::int64_t d = 0; d < p.Dv; ++d) o[static_cast<std::size_t>(d)] += z * e * V[j][d];
    }
    if (to) {
      to.l.set(i, h, l);
      for (std::int64_t d = 0; d < p.Dv; ++d)
        store_element(to.o.at(i, h), to.o.type, d, o[static_cast<std::size_t>(d)] / r);
      continue;
    }
    const bool sees_nothing = l == 0;
    for (std::int64_t d = 0; d < p.Dv; ++d)
      store_element(O.at(i, h), O.type, d, sees_nothing ? 0 : o[static_cast<std::size_t>(d)] / l);
    if (LSE) LSE.set(i, h, sees_nothing ? -infinity : m + std::log(l));
  }
}

}  // namespace

void forward(const Problem& p, const Call& call, int threads) {
  if (!p.has_queries()) return;
  std::vector<Room> rooms(static_cast<std::size_t>(worker_count(p.B * p.Hq, threads)), Room(p, Longest(p, call)));
  report_pages(p, call);
  parallel_for(p.B * p.Hq, threads, [&](std::int64_t index, int worker) {
    const Sequence s = sequence_of(p, call, index / p.Hq);
    forward_head(p, call, s, index % p.Hq, rooms[static_cast<std::size_t>(worker)]);
  });
}

}  // namespace tessera::reference
