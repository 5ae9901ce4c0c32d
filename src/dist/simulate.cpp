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
  Simulation(const Schedule& s, const Shape& shape, const Machine& machine) :
      s(s), shape(shape), machine(machine), sizes(s, shape) {}

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
        busy[r] = link_seconds(int(r), step);
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
      const double row = double(sizes.key_heads(int(r)) * (shape.D + shape.Dv) * shape.bytes);
      out.key_bytes = std::max(out.key_bytes, row * double(s.of[r].slot_rows));
    }
    if (ranks) out.compute = computing / double(ranks);
    return out;
  }

 private:
  double work_seconds(std::size_t rank, const Step& step, Int64& calls) {
    const bool backward = s.settings.pass == Pass::backward;
    const double heads = double(sizes.query_heads(int(rank)));
    const double each = 2 * heads * double(backward ? 3 * shape.D + 2 * shape.Dv : shape.D + shape.Dv);
    double seconds = 0;
    for (const Work& w : step.work) {
      const double flops = each * sizes.pairs(w);
      const CallTimes& times = backward ? machine.backward_times : machine.forward_times;
      const double rate = backward ? machine.backward_flops : machine.forward_flops;
      const double needed = flops / (times.empty() ? rate : times.best_rate());
      computing += needed, ++calls;
      seconds += times.empty() ? needed + machine.call_seconds : times.seconds(flops);
    }
    return seconds;
  }

  // How long the busier of a rank's two directions is.
  double link_seconds(int rank, const Step& step) const {
    double out = 0, in = 0;
    for (const Transfer& x : step.group) {
      const bool inside = x.what == What::heads || x.what == What::results;
      const double seconds = double(sizes.bytes(rank, x)) / (inside ? machine.node_link : machine.link);
      (x.send ? out : in) += seconds;
    }
    return std::max(out, in);
  }

  const Schedule& s;
  const Shape& shape;
  const Machine& machine;
  Sizes sizes;
  double computing = 0;
};

}  // namespace

double CallTimes::seconds(double flops) const {
  if (flops <= points.front().flops) return points.front().seconds;
  const auto after = std::find_if(points.begin(), points.end(), [&](const Point& p) { return p.flops >= flops; });
  if (after == points.end()) return points.back().seconds * flops / points.back().flops;
  const Point &a = after[-1], &b = *after;
  return a.seconds + (b.seconds - a.seconds) * (flops - a.flops) / (b.flops - a.flops);
}

double CallTimes::best_rate() const {
  double best = 0;
  for (const Point& p : points) best = std::max(best, p.flops / p.seconds);
  return best;
}

Simulated simulate(const Schedule& schedule, const Shape& shape, const Machine& machine) {
  return Simulation(schedule, shape, machine).run();
}

}  // namespace tessera::dist
