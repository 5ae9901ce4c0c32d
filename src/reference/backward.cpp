// SPDX-License-Identifier: Apache-2.0
// The backward pass, in float64, one query row at a time: docs/algorithm.md, equations (7) to (14).
#include "core/parallel.hpp"
#include "reference/kernel.hpp"
#include "reference/scores.hpp"

namespace tessera::reference {
namespace {

// Adds to, or replaces, an element of an output.
void put(void* data, Type type, std::int64_t index, double value, bool accumulate) {
  store_element(data, type, index, accumulate ? load_element(data, type, index) + value : value);
}

void write_rows(const TokenRows& out, std::int64_t h, const Matrix& X, std::int64_t rows, bool accumulate) {
  if (!out) return;
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t d = 0; d < X.width; ++d) put(out.at(i, h), out.type, d, X[i][d], accumulate);
}

// Sums of ds over the dimensions in which bias is broadcast, and of each head's sink gradient.
struct Shared {
  std::array<std::int64_t, 4> shape{1, 1, 1, 1};
  std::vector<double> dbias;
  std::vector<double> dsink;  // [B, Hq]; summed over B at the end

  double& dbias_at(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
    std::int64_t index = 0;
    const std::int64_t position[4] = {b, h, i, j};
    for (std::size_t n = 0; n < 4; ++n) index = index * shape[n] + (shape[n] == 1 ? 0 : position[n]);
    return dbias[static_cast<std::size_t>(index)];
  }
};

// What one KV head of one sequence is computed in.
struct Room {
  Matrix Q, O, dO, dQ, K, V, dK, dV;

  Room(const Problem& p, const Longest& longest) :
      Q(longest.nq, p.D), O(longest.nq, p.Dv), dO(longest.nq, p.Dv), dQ(longest.nq, p.D), K(longest.nk, p.D),
      V(longest.nk, p.Dv), dK(longest.nk, p.D), dV(longest.nk, p.Dv) {}
};

void backward_head(const Problem& p, const Call& call, const Sequence& s, std::int64_t h, Room& room, Shared& shared) {
  const Head head(p, call, s, h);
  auto& [Q, O, dO, dQ, K, V, dK, dV] = room;
  Q.load(token_rows(call.inputs.q, p, s.b, s.q_begin), h, s.nq);
  O.load(token_rows(call.saved.o, p, s.b, s.q_begin), h, s.nq);
  dO.load(token_rows(call.saved.d_o, p, s.b, s.q_begin), h, s.nq);
  dQ.clear();
  const RowNumbers LSE = row_numbers(call.saved.lse, p, s), dLSE = row_numbers(call.saved.d_lse, p, s);
  double dsink = 0;

  for (std::int64_t i = 0; i < s.nq; ++i) {
    const double lse = LSE.get(i, h);
    if (lse == -infinity) continue;  // sees no key: nothing flows through this row
    const double delta = dot(dO[i], O[i], p.Dv) - (dLSE ? dLSE.get(i, h) : 0);
    if (p.sinks) dsink -= std::exp(head.sink - lse) * delta;
    for (std::int64_t j = 0; j < s.nk; ++j) {
      if (!head.visible(i, j)) continue;
      const double s_cap = head.capped(dot(Q[i], K[j], p.D), i, j);
      const double P = std::exp(head.score(s_cap, i, j) - lse);
      const double z = head.keep(i, j);
      const double dP = z == 0 ? 0 : z * dot(dO[i], V[j], p.Dv);
      if (z != 0)
        for (std::int64_t d = 0; d < p.Dv; ++d) dV[j][d] += z * P * dO[i][d];
      double dS = P * (dP - delta);
      if (p.dbias) shared.dbias_at(s.b, h, i, j) += dS;
      dS *= head.derivative(s_cap, i, j);
      for (std::int64_t d = 0; d < p.D; ++d) {
        dQ[i][d] += p.options.scale * dS * K[j][d];
        dK[j][d] += p.options.scale * dS * Q[i][d];
      }
    }
  }
  shared.dsink[static_cast<std::size_t>(s.b * p.Hq + h)] = dsink;
  write_rows(token_rows(call.gradients.dq, p, s.b, s.q_begin), h, dQ, s.nq, p.options.accumulate);
}

// All the query heads of one KV head of one sequence: they share dK and dV.
void backward_group(const Problem& p, const Call& call, const Sequence& s, std::int64_t kv, Room& room,
                    Shared& shared) {
  room.K.load(keys_of(p, call, s, kv), s.nk);
  room.V.load(values_of(p, call, s, kv), s.nk);
  room.dK.clear(), room.dV.clear();
  const std::int64_t group = p.heads_per_kv();
  for (std::int64_t h = kv * group; h < (kv + 1) * group; ++h) backward_head(p, call, s, h, room, shared);
  write_rows(token_rows(call.gradients.dk, p, s.b, s.k_begin), kv, room.dK, s.nk, p.options.accumulate);
  write_rows(token_rows(call.gradients.dv, p, s.b, s.k_begin), kv, room.dV, s.nk, p.options.accumulate);
}

void write_shared(const Problem& p, const Call& call, Shared& shared) {
  const Tensor& dbias = call.gradients.dbias;
  const auto& n = shared.shape;
  for (std::int64_t b = 0; p.dbias && b < n[0]; ++b)
    for (std::int64_t h = 0; h < n[1]; ++h)
      for (std::int64_t i = 0; i < n[2]; ++i)
        for (std::int64_t j = 0; j < n[3]; ++j)
          put(dbias.data, dbias.type,
              b * stride(dbias, 0) + h * stride(dbias, 1) + i * stride(dbias, 2) + j * stride(dbias, 3),
              shared.dbias_at(b, h, i, j), p.options.accumulate);
  const Tensor& dsinks = call.gradients.dsinks;
  for (std::int64_t h = 0; p.dsinks && h < p.Hq; ++h) {
    double sum = 0;
    for (std::int64_t b = 0; b < p.B; ++b) sum += shared.dsink[static_cast<std::size_t>(b * p.Hq + h)];
    put(dsinks.data, dsinks.type, h * stride(dsinks, 0), sum, p.options.accumulate);
  }
}

}  // namespace

void backward(const Problem& p, const Call& call, int threads) {
  if (!p.has_queries()) return clear_gradients(p, call);
  Shared shared;
  shared.dsink.assign(static_cast<std::size_t>(p.B * p.Hq), 0.0);
  if (p.dbias) {
    shared.shape = p.bias->shape;
    shared.dbias.assign(static_cast<std::size_t>(call.gradients.dbias.elements()), 0.0);
    threads = 1;  // a broadcast bias sums over heads and sequences: in order
  }
  std::vector<Room> rooms(static_cast<std::size_t>(worker_count(p.B * p.Hk, threads)), Room(p, Longest(p, call)));
  const auto group = [&](std::int64_t index, int worker) {
    const Sequence s = sequence_of(p, call, index / p.Hk);
    backward_group(p, call, s, index % p.Hk, rooms[static_cast<std::size_t>(worker)], shared);
  };
  PreparedSteps prepared({{p.B * p.Hk, group}}, threads);
  // From here on nothing fails: outputs are written.
  clear_unused_rows(p, call);
  prepared.run();
  write_shared(p, call, shared);
}

}  // namespace tessera::reference
