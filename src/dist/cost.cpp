// SPDX-License-Identifier: Apache-2.0
// Costs of schedules; see cost.hpp. What is counted is what executor.cpp allocates and sends.
#include "dist/cost.hpp"

#include <algorithm>
#include <cstdio>

#include "dist/attention.hpp"

namespace tessera::dist {
namespace {

std::size_t index(Int64 x) { return static_cast<std::size_t>(x); }

class Counter {
 public:
  Counter(const Schedule& s, const Shape& shape, int rank) : s(s), shape(shape), sizes(s, shape), rank(rank) {}

  RankCost count() const {
    const RankSchedule& mine = s.of[index(rank)];
    RankCost cost;
    cost.rows = s.partition.rows(rank);
    Int64 largest = 0;
    std::vector<Int64> under_way;  // bytes of the groups of each step
    for (const Step& step : mine.steps) {
      Int64 sent = 0, received = 0;
      for (const Transfer& x : step.group) (x.send ? sent : received) += sizes.bytes(rank, x);
      under_way.push_back(sent + received);
      Int64 together = 0;
      for (std::size_t t = under_way.size() - std::min(under_way.size(), index(s.ahead)); t < under_way.size(); ++t)
        together += under_way[t];
      largest = greater(largest, together);
      cost.steps += !step.group.empty() || !step.work.empty();
      cost.sent += sent, cost.received += received;
      for (const Work& w : step.work) cost.pairs += sizes.pairs(w) * double(sizes.query_heads(rank));
    }
    cost.memory = memory(mine.slot_rows) + largest;
    return cost;
  }

 private:
  Int64 memory(Int64 key_rows) const {
    Int64 rows = 0;
    for (const Span& span : node_rows(s.partition, s.node_of(rank))) rows += span.rows();
    const Int64 hq = sizes.query_heads(rank), hk = sizes.key_heads(rank), D = shape.D, Dv = shape.Dv, b = shape.bytes;
    const Int64 keys = key_rows * hk * (D + Dv);
    if (s.settings.pass == Pass::forward)  // Q, K, V; the state; O and LSE
      return rows * hq * (D * b + Dv * 4 + 12 + Dv * b + 4) + keys * b;
    // Q, O, dO, LSE and K, V; sums of dQ, dK and dV in f32; the same in their own types
    return rows * hq * (D * (b + 4 + b) + 2 * Dv * b + 4) + keys * (b + 4) + rows * hk * (D + Dv) * b;
  }

  const Schedule& s;
  const Shape& shape;
  Sizes sizes;
  int rank;
};

std::string amount(double bytes) {
  const char* units[] = {"B", "kB", "MB", "GB", "TB", "PB"};
  std::size_t u = 0;
  for (; bytes >= 1000 && u + 1 < std::size(units); ++u) bytes /= 1000;
  char out[32];
  std::snprintf(out, sizeof out, bytes < 10 && u > 0 ? "%.1f %s" : "%.0f %s", bytes, units[u]);
  return out;
}

std::string line_of(const std::string& ranks, const RankCost& f, const RankCost& b) {
  char out[256];
  std::snprintf(out, sizeof out, "%-14s%12lld%8lld%10s%10s%8lld%10s%10s\n", ranks.c_str(),
                static_cast<long long>(f.rows), static_cast<long long>(f.steps), amount(double(f.sent)).c_str(),
                amount(double(f.memory)).c_str(), static_cast<long long>(b.steps), amount(double(b.sent)).c_str(),
                amount(double(b.memory)).c_str());
  return out;
}

}  // namespace

std::vector<RankCost> rank_costs(const Schedule& s, const Shape& shape) {
  std::vector<RankCost> out;
  for (int r = 0; r < s.partition.ranks(); ++r) out.push_back(Counter(s, shape, r).count());
  return out;
}

double balance(const std::vector<RankCost>& costs) {
  double sum = 0, most = 0;
  for (const RankCost& cost : costs) sum += cost.pairs, most = std::max(most, cost.pairs);
  return most == 0 ? 1 : sum / double(costs.size()) / most;
}

std::string table(const Schedule& forward, const Schedule& backward, const Shape& shape) {
  const std::vector<RankCost> f = rank_costs(forward, shape), b = rank_costs(backward, shape);
  char head[256];
  std::snprintf(head, sizeof head, "%-14s%12s%8s%10s%10s%8s%10s%10s\n", "", "", "forward", "", "", "backward", "", "");
  std::string out = head;
  std::snprintf(head, sizeof head, "%-14s%12s%8s%10s%10s%8s%10s%10s\n", "rank", "rows", "steps", "sent", "memory",
                "steps", "sent", "memory");
  out += head;
  std::vector<std::string> lines;
  for (std::size_t r = 0; r < f.size(); ++r) lines.push_back(line_of("", f[r], b[r]));
  for (std::size_t r = 0, end = 0; r < f.size(); r = end) {
    for (end = r + 1; end < f.size() && lines[end] == lines[r];) ++end;
    const std::string first = std::to_string(r), last = std::to_string(end - 1);
    out += line_of(end == r + 1 ? first : first + " to " + last, f[r], b[r]);
  }
  std::snprintf(head, sizeof head, "balance of work %.3f forward, %.3f backward\n", balance(f), balance(b));
  return out + head;
}

}  // namespace tessera::dist
