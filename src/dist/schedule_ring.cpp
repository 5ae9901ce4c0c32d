// SPDX-License-Identifier: Apache-2.0
// The ring: step s brings the keys of the node s places before, straight from it. See schedule.hpp.
#include <algorithm>
#include <map>

#include "dist/schedule_make.hpp"

namespace tessera::dist {
namespace {

std::size_t index(Int64 x) { return static_cast<std::size_t>(x); }

class Ring {
 public:
  explicit Ring(Draft& d) : d(d), s(d.s) {}

  // What arrives in step t is worked on in step t + 1, and its gradients leave in step t + 2.
  void make(int node) {
    const std::map<int, Int64> at = place(node);
    struct Seen {
      int phase, query, key;
    };
    std::vector<Seen> seen;
    for (const int q : d.held[index(node)])
      d.for_pieces(d.piece(q).rows.sequence, keys_seen(s, d.piece(q)), [&](int k) {
        seen.push_back({phase(k, node), q, k});
      });
    std::stable_sort(seen.begin(), seen.end(), [](const Seen& a, const Seen& b) { return a.phase < b.phase; });
    for (std::size_t i = 0; i < seen.size();) {
      // Neighbouring keys that lie side by side are one call.
      const Seen& first = seen[i];
      Work w{first.query, {d.piece(first.key).rows.begin, d.piece(first.key).rows.end}, at.at(first.key)};
      for (++i; i < seen.size() && seen[i].phase == first.phase && seen[i].query == first.query &&
                d.piece(seen[i].key).rows.begin == w.keys.end && at.at(seen[i].key) == w.at + w.keys.size();
           ++i)
        w.keys.end = d.piece(seen[i].key).rows.end;
      d.work(first.phase + 1, node, w);
    }
    for (const auto& [key, row] : at) {
      const int owner = d.piece(key).node;
      if (owner == node) continue;
      const Span& rows = d.piece(key).rows;
      d.transfer(phase(key, node), owner, node, {.what = What::keys, .rows = rows}, d.piece(key).at, row);
      if (s.settings.pass == Pass::backward)
        d.transfer(phase(key, node) + 2, node, owner, {.what = What::gradients, .rows = rows}, row, d.piece(key).at);
    }
  }

 private:
  int phase(int key, int node) const { return (node - d.piece(key).node + d.nodes()) % d.nodes(); }

  // Where each piece lies that the node sees: its own first, in their order, then two sets for those of others, used
  // in turns.
  std::map<int, Int64> place(int node) {
    std::map<int, Int64> at;
    Int64 own = 0, largest = 0;
    for (const int p : d.held[index(node)]) at[p] = d.piece(p).at, own += d.piece(p).rows.rows();
    std::vector<Int64> arriving(index(d.nodes()));  // rows of each phase
    for (const int q : d.held[index(node)])
      d.for_pieces(d.piece(q).rows.sequence, keys_seen(s, d.piece(q)), [&](int k) {
        if (d.piece(k).node == node || !at.emplace(k, 0).second) return;
        largest = greater(largest, arriving[index(phase(k, node))] += d.piece(k).rows.rows());
      });
    std::fill(arriving.begin(), arriving.end(), 0);
    for (auto& [key, row] : at) {
      if (d.piece(key).node == node) continue;
      Int64& used = arriving[index(phase(key, node))];
      row = own + (phase(key, node) % 2) * largest + used;
      used += d.piece(key).rows.rows();
    }
    RankSchedule r;
    r.slot_rows = own + 2 * largest;
    for (const Span& span : node_rows(s.partition, node))
      r.home.push_back(d.piece(piece_at(s, span.sequence, span.begin)).at);
    for (int u = 0; u < s.partition.slices; ++u) {
      RankSchedule& rank = s.of[index(s.rank_of(node, u))];
      rank.home = r.home, rank.slot_rows = r.slot_rows;
    }
    return at;
  }

  Draft& d;
  Schedule& s;
};

}  // namespace

void make_ring(Draft& d) {
  Ring ring(d);
  for (int node = 0; node < d.nodes(); ++node) ring.make(node);
}

}  // namespace tessera::dist
