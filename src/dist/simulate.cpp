// SPDX-License-Identifier: Apache-2.0
// The simulator; see simulate.hpp. Each rank has one link out and one in, and computes while they work; a step ends
// when its work and its messages are done, and a message begins when both ends have reached the step.
#include "dist/simulate.hpp"

#include <algorithm>
#include <set>
#include <utility>

namespace tessera::dist {
namespace {

std::size_t index(Int64 x) { return static_cast<std::size_t>(x); }

class Simulation {
 public:
  Simulation(const Schedule& s, const Shape& shape, const Machine& machine) : s(s), shape(shape), machine(machine) {}

  Simulated run() {
    const std::size_t ranks = s.of.size(), steps = ranks ? s.of[0].steps.size() : 0;
    std::vector<double> now(ranks);
    std::vector<Int64> calls(ranks);
    for (std::size_t t = 0; t < steps; ++t) {
      std::vector<double> busy(ranks), end = now;
      for (std::size_t r = 0; r < ranks; ++r) busy[r] = link_seconds(s.of[r].steps[t]);
      for (std::size_t r = 0; r < ranks; ++r) {
        const Step& step = s.of[r].steps[t];
        end[r] = now[r] + work_seconds(r, step, calls[r]);
        double begin = now[r], slowest = busy[r];
        for (const Transfer& x : step.group)
          begin = std::max(begin, now[index(x.peer)]), slowest = std::max(slowest, busy[index(x.peer)]);
        if (!step.group.empty()) end[r] = std::max(end[r], begin + machine.latency + slowest);
      }
      now = std::move(end);
    }
    Simulated out;
    for (std::size_t r = 0; r < ranks; ++r) {
      out.seconds = std::max(out.seconds, now[r]), out.calls = std::max(out.calls, calls[r]);
      const double row = double(hk(int(r)) * (shape.D + shape.Dv) * shape.bytes);
      out.key_bytes = std::max(out.key_bytes, row * double(s.of[r].slot_rows));
    }
    if (ranks) out.compute = computing / double(ranks);
    return out;
  }

 private:
  Int64 hk(int rank) const {
    const int u = s.slice_of(rank), slices = s.partition.slices;
    return shape.Hk * (u + 1) / slices - shape.Hk * u / slices;
  }

  // Pairs of a query of the piece and a key from begin to end that it sees.
  double pairs(const Piece& query, Int64 begin, Int64 end) const {
    BandMask band = s.mask.band(s.lengths[index(query.rows.sequence)]);
    band.low -= begin, band.high -= begin, band.keys = end - begin;
    return visible_pairs(band, query.rows.begin, query.rows.end);
  }

  double work_seconds(std::size_t rank, const Step& step, Int64& calls) {
    const bool backward = s.settings.pass == Pass::backward;
    const double heads = double(hk(int(rank)) * (shape.Hq / shape.Hk));
    const double each = 2 * heads * double(backward ? 3 * shape.D + 2 * shape.Dv : shape.D + shape.Dv);
    double seconds = 0;
    const Work* last = nullptr;
    for (const Work& w : step.work) {
      const Span& keys = s.pieces[index(w.key)].rows;
      const double flops = each * pairs(s.pieces[index(w.query)], keys.begin, keys.end);
      const double needed = flops / (backward ? machine.backward_flops : machine.forward_flops);
      computing += needed, seconds += needed;
      if (!last || !joins(rank, *last, w)) seconds += machine.call_seconds, ++calls;
      last = &w;
    }
    return seconds;
  }

  // Does the executor make one call of both?
  bool joins(std::size_t rank, const Work& a, const Work& b) const {
    const Span &x = s.pieces[index(a.key)].rows, &y = s.pieces[index(b.key)].rows;
    const std::vector<Int64>& row = s.of[rank].slot_row;
    return s.settings.segment == 0 && a.query == b.query && x.sequence == y.sequence && x.end == y.begin &&
           row[index(a.slot)] + x.rows() == row[index(b.slot)];
  }

  // How long the busier of a rank's two directions is.
  double link_seconds(const Step& step) const {
    double out = 0, in = 0;
    std::set<std::pair<What, int>> left;  // pieces that have left already
    for (const Transfer& x : step.group) {
      const bool inside = x.what == What::heads || x.what == What::results;
      const double seconds = bytes(x) / (inside ? machine.node_link : machine.link);
      if (!x.send)
        in += seconds;
      else if (!machine.shared || x.what != What::keys || left.insert({x.what, x.piece}).second)
        out += seconds;
    }
    return std::max(out, in);
  }

  double bytes(const Transfer& x) const {
    const double key_row = double(hk(x.peer) * (shape.D + shape.Dv));
    if (x.what == What::keys) return double(s.pieces[index(x.piece)].rows.rows()) * key_row * double(shape.bytes);
    if (x.what == What::gradients) return double(s.pieces[index(x.piece)].rows.rows()) * key_row * 4;
    // Q, K and V there and O back; in the backward pass Q, K, V, O and dO there and dQ, dK and dV back.
    const double query_row = double(shape.Hq / shape.Hk * hk(x.peer)), rows = double(s.partition.rows(x.peer));
    const bool backward = s.settings.pass == Pass::backward;
    const double there = query_row * double(shape.D + (backward ? 2 * shape.Dv : 0)) + key_row;
    const double back = backward ? query_row * double(shape.D) + key_row : query_row * double(shape.Dv);
    return rows * (x.what == What::heads ? there : back) * double(shape.bytes);
  }

  const Schedule& s;
  const Shape& shape;
  const Machine& machine;
  double computing = 0;
};

}  // namespace

Simulated simulate(const Schedule& schedule, const Shape& shape, const Machine& machine) {
  return Simulation(schedule, shape, machine).run();
}

}  // namespace tessera::dist
