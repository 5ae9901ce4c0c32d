// SPDX-License-Identifier: Apache-2.0
// The simulator; see simulate.hpp. Each rank has one link out and one in, and computes while they work. As in the
// executor, a group is under way when those before it are complete and its own ranks have reached the step, and a step
// begins when the groups that it waits for are complete.
#include "dist/simulate.hpp"

#include <algorithm>

namespace tessera::dist {
namespace {

std::size_t index(Int64 x) { return static_cast<std::size_t>(x); }

class Simulation {
 public:
  Simulation(const Schedule& s, const Shape& shape, const Machine& machine) : s(s), shape(shape), machine(machine) {}

  Simulated run() {
    const std::size_t ranks = s.of.size(), steps = ranks ? s.of[0].steps.size() : 0;
    const auto ahead = index(s.ahead);
    std::vector<double> now(ranks);
    std::vector<std::vector<double>> complete(steps, std::vector<double>(ranks));  // groups, those before included
    std::vector<Int64> calls(ranks);
    for (std::size_t t = 0; t < steps; ++t) {
      std::vector<double> begin(ranks), busy(ranks);
      for (std::size_t r = 0; r < ranks; ++r) {
        const Step& step = s.of[r].steps[t];
        if (t >= ahead) now[r] = std::max(now[r], complete[t - ahead][r]);
        if (t > 0 && s.partition.slices > 1 && t + 1 == steps) now[r] = std::max(now[r], complete[t - 1][r]);
        begin[r] = t > 0 ? std::max(now[r], complete[t - 1][r]) : now[r];
        busy[r] = link_seconds(step);
        now[r] += work_seconds(r, step, calls[r]);
      }
      for (std::size_t r = 0; r < ranks; ++r) {
        const Step& step = s.of[r].steps[t];
        double from = begin[r], slowest = busy[r];
        for (const Transfer& x : step.group)
          from = std::max(from, begin[index(x.peer)]), slowest = std::max(slowest, busy[index(x.peer)]);
        complete[t][r] = step.group.empty() ? (t > 0 ? complete[t - 1][r] : 0) : from + machine.latency + slowest;
      }
    }
    if (steps)
      for (std::size_t r = 0; r < ranks; ++r) now[r] = std::max(now[r], complete[steps - 1][r]);
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
    for (const Work& w : step.work) {
      const double flops = each * pairs(s.pieces[index(w.query)], w.keys.begin, w.keys.end);
      const double needed = flops / (backward ? machine.backward_flops : machine.forward_flops);
      computing += needed, seconds += needed + machine.call_seconds, ++calls;
    }
    return seconds;
  }

  // How long the busier of a rank's two directions is.
  double link_seconds(const Step& step) const {
    double out = 0, in = 0;
    for (const Transfer& x : step.group) {
      const bool inside = x.what == What::heads || x.what == What::results;
      const double seconds = bytes(x) / (inside ? machine.node_link : machine.link);
      (x.send ? out : in) += seconds;
    }
    return std::max(out, in);
  }

  double bytes(const Transfer& x) const {
    const double key_row = double(hk(x.peer) * (shape.D + shape.Dv));
    if (x.what == What::keys) return double(x.rows.rows()) * key_row * double(shape.bytes);
    if (x.what == What::gradients || x.what == What::sums) return double(x.rows.rows()) * key_row * 4;
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
