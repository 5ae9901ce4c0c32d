// SPDX-License-Identifier: Apache-2.0
// Making of schedules; see schedule.hpp.
#include "dist/schedule.hpp"

#include <algorithm>
#include <bit>
#include <utility>

#include "tessera/tessera.hpp"

namespace tessera::dist {
namespace {

std::size_t index(Int64 x) { return static_cast<std::size_t>(x); }

// Chunks 0, 1, 2 to 3, 4 to 7 and so on of a sequence arrive together: every rank starts on the first keys early, and
// later calls are large.
int range_of(Int64 chunk) { return static_cast<int>(std::bit_width(static_cast<UInt64>(chunk))); }

// The rows of all nodes in pieces, by sequence and position. chunk: the place of each piece's span in its sequence.
void cut_pieces(Schedule& s, std::vector<Int64>& chunk) {
  struct Held {
    Span rows;
    int node;
    Int64 at;
  };
  std::vector<Held> spans;
  for (int node = 0; node < s.partition.nodes(); ++node) {
    Int64 at = 0;
    for (const Span& span : node_rows(s.partition, node)) spans.push_back({span, node, at}), at += span.rows();
  }
  std::sort(spans.begin(), spans.end(), [](const Held& a, const Held& b) {
    return std::pair(a.rows.sequence, a.rows.begin) < std::pair(b.rows.sequence, b.rows.begin);
  });
  const Int64 segment = s.settings.segment;
  Int64 sequence = -1, number = 0, leaf = 0;
  for (const Held& held : spans) {
    const Span& span = held.rows;
    if (span.sequence != sequence) sequence = span.sequence, number = 0, leaf = 0;
    if (segment > 0 &&
        (span.begin % segment != 0 || (span.end % segment != 0 && span.end != s.lengths[index(span.sequence)])))
      throw Error(TESSERA_INVALID_ARGUMENT, "segment: is " + std::to_string(segment) + "; rows " +
                                                std::to_string(span.begin) + " to " + std::to_string(span.end) +
                                                " of sequence " + std::to_string(span.sequence) +
                                                " must begin and end on multiples of it, or with the sequence");
    for (Int64 begin = span.begin; begin < span.end;) {
      const Int64 end = segment > 0 ? lesser(begin + segment, span.end) : span.end;
      s.pieces.push_back({{sequence, begin, end}, held.node, held.at + begin - span.begin, leaf++});
      chunk.push_back(number);
      begin = end;
    }
    ++number;
  }
}

// For each sequence, where its pieces begin in the list; one more entry at the end.
std::vector<std::size_t> sequence_begins(const Schedule& s) {
  std::vector<std::size_t> begins(s.lengths.size() + 1, s.pieces.size());
  for (std::size_t p = s.pieces.size(); p-- > 0;) begins[index(s.pieces[p].rows.sequence)] = p;
  for (std::size_t b = s.lengths.size(); b-- > 0;) begins[b] = std::min(begins[b], begins[b + 1]);
  return begins;
}

class Maker {
 public:
  Maker(const std::vector<Int64>& lengths, const Mask& mask, const Partition& partition, const Settings& settings) {
    s.settings = settings, s.partition = partition, s.lengths = lengths, s.mask = mask;
    cut_pieces(s, chunk);
    begins = sequence_begins(s);
    s.of.resize(index(partition.ranks()));
    nodes.resize(index(partition.nodes()));
    held.resize(nodes.size());
    for (std::size_t p = 0; p < s.pieces.size(); ++p) held[index(s.pieces[p].node)].push_back(static_cast<int>(p));
  }

  Schedule make() {
    for (int node = 0; node < s.partition.nodes(); ++node) look(node);
    int phases = 0;
    for (const Node& node : nodes)
      for (const Seen& seen : node.work) phases = std::max(phases, seen.phase + 1);
    // Phase t arrives in step t, is worked on in step t + 1 and its gradients leave in step t + 2.
    steps = phases == 0 ? 0 : phases + (s.settings.pass == Pass::backward ? 2 : 1);
    for (RankSchedule& rank : s.of) rank.steps.resize(index(steps));
    for (int node = 0; node < s.partition.nodes(); ++node) place(node);
    for (int node = 0; node < s.partition.nodes(); ++node) bring_keys(node);
    if (s.settings.pass == Pass::backward)
      for (int node = 0; node < s.partition.nodes(); ++node) return_gradients(node);
    drop_idle_ends();
    if (s.partition.slices > 1) exchange_heads();
    return std::move(s);
  }

 private:
  struct Seen {
    int query, key, phase;
  };
  struct Node {
    std::vector<Seen> work;  // by phase, then query, then key
    std::vector<int> keys;   // pieces that it sees, ascending
    std::vector<int> slot;   // of these
  };

  int phase(int key, int node) const {
    const int owner = s.pieces[index(key)].node, nodes_all = s.partition.nodes();
    if (s.settings.scheme == Scheme::gather) return range_of(chunk[index(key)]);
    return (node - owner + nodes_all) % nodes_all;
  }

  // Which keys the queries of a node see.
  void look(int node) {
    Node& n = nodes[index(node)];
    for (const int q : held[index(node)]) {
      const Span& rows = s.pieces[index(q)].rows;
      const Range keys = visible_keys(s.mask.band(s.lengths[index(rows.sequence)]), {rows.begin, rows.end});
      if (keys.empty()) continue;
      const auto begin = s.pieces.begin() + static_cast<std::ptrdiff_t>(begins[index(rows.sequence)]);
      const auto end = s.pieces.begin() + static_cast<std::ptrdiff_t>(begins[index(rows.sequence) + 1]);
      auto k = std::partition_point(begin, end, [&](const Piece& p) { return p.rows.end <= keys.begin; });
      for (; k != end && k->rows.begin < keys.end; ++k) {
        const int key = static_cast<int>(k - s.pieces.begin());
        n.work.push_back({q, key, phase(key, node)});
        n.keys.push_back(key);
      }
    }
    std::stable_sort(n.work.begin(), n.work.end(), [](const Seen& a, const Seen& b) { return a.phase < b.phase; });
    std::sort(n.keys.begin(), n.keys.end());
    n.keys.erase(std::unique(n.keys.begin(), n.keys.end()), n.keys.end());
  }

  // Slots: the node's own pieces where they are, then those of other nodes. A ring has two sets for these, used in
  // turns; otherwise each has a place of its own, and neighbours lie side by side.
  void place(int node) {
    Node& n = nodes[index(node)];
    RankSchedule r;
    const std::vector<int>& own = held[index(node)];
    for (const int p : own) r.slot_row.push_back(s.pieces[index(p)].at), r.slot_rows += s.pieces[index(p)].rows.rows();
    const bool ring = s.settings.scheme == Scheme::ring;
    std::vector<Int64> arriving(index(steps));  // rows of each phase
    Int64 largest = 0;
    for (const int key : n.keys) {
      const Piece& piece = s.pieces[index(key)];
      if (ring && piece.node != node)
        largest = greater(largest, arriving[index(phase(key, node))] += piece.rows.rows());
    }
    std::fill(arriving.begin(), arriving.end(), 0);
    const Int64 base = r.slot_rows;
    for (const int key : n.keys) {
      const Piece& piece = s.pieces[index(key)];
      if (piece.node == node) {
        n.slot.push_back(static_cast<int>(std::lower_bound(own.begin(), own.end(), key) - own.begin()));
        continue;
      }
      n.slot.push_back(static_cast<int>(r.slot_row.size()));
      const auto t = index(phase(key, node));
      Int64& used = ring ? arriving[t] : r.slot_rows;
      r.slot_row.push_back((ring ? base + (phase(key, node) % 2) * largest : 0) + used);
      used += piece.rows.rows();
    }
    if (ring) r.slot_rows = base + 2 * largest;
    for (int u = 0; u < s.partition.slices; ++u) {
      RankSchedule& rank = s.of[index(s.rank_of(node, u))];
      rank.slot_row = r.slot_row, rank.slot_rows = r.slot_rows;
      for (const Seen& w : n.work) rank.steps[index(w.phase + 1)].work.push_back({w.query, w.key, slot(n, w.key)});
    }
  }

  static int slot(const Node& n, int key) {
    return n.slot[index(std::lower_bound(n.keys.begin(), n.keys.end(), key) - n.keys.begin())];
  }

  void transfer(int step, int from, int to, Transfer t, int slot_from, int slot_to) {
    for (int u = 0; u < s.partition.slices; ++u) {
      const int a = s.rank_of(from, u), b = s.rank_of(to, u);
      t.send = true, t.peer = b, t.slot = slot_from;
      s.of[index(a)].steps[index(step)].group.push_back(t);
      t.send = false, t.peer = a, t.slot = slot_to;
      s.of[index(b)].steps[index(step)].group.push_back(t);
    }
  }

  void bring_keys(int node) {
    const Node& n = nodes[index(node)];
    for (std::size_t i = 0; i < n.keys.size(); ++i) {
      const int owner = s.pieces[index(n.keys[i])].node;
      if (owner == node) continue;
      const std::vector<int>& own = held[index(owner)];
      const auto at_home = static_cast<int>(std::lower_bound(own.begin(), own.end(), n.keys[i]) - own.begin());
      transfer(phase(n.keys[i], node), owner, node, {.what = What::keys, .piece = n.keys[i]}, at_home, n.slot[i]);
    }
  }

  void return_gradients(int node) {
    for (const int key : nodes[index(node)].keys) {
      const Piece& piece = s.pieces[index(key)];
      if (piece.node == node) continue;
      for (const Leaves& share : shares(s, node, piece))
        transfer(phase(key, node) + 2, node, piece.node,
                 {.what = What::gradients, .piece = key, .first = share.first, .last = share.last}, -1, -1);
    }
  }

  // Steps at either end in which nobody does anything.
  void drop_idle_ends() {
    const auto idle = [&](std::size_t step) {
      return std::all_of(s.of.begin(), s.of.end(), [&](const RankSchedule& r) {
        return r.steps[step].group.empty() && r.steps[step].work.empty();
      });
    };
    std::size_t begin = 0, end = index(steps);
    while (begin < end && idle(begin)) ++begin;
    while (begin < end && idle(end - 1)) --end;
    for (RankSchedule& r : s.of)
      r.steps = {std::make_move_iterator(r.steps.begin() + static_cast<std::ptrdiff_t>(begin)),
                 std::make_move_iterator(r.steps.begin() + static_cast<std::ptrdiff_t>(end))};
  }

  void exchange_heads() {
    for (int rank = 0; rank < s.partition.ranks(); ++rank) {
      Step first, last;
      for (int u = 0; u < s.partition.slices; ++u) {
        const int peer = s.rank_of(s.node_of(rank), u);
        if (peer == rank) continue;
        for (const bool send : {true, false}) {
          first.group.push_back({.what = What::heads, .send = send, .peer = peer});
          last.group.push_back({.what = What::results, .send = send, .peer = peer});
        }
      }
      std::vector<Step>& steps_of = s.of[index(rank)].steps;
      steps_of.insert(steps_of.begin(), std::move(first));
      steps_of.push_back(std::move(last));
    }
  }

  Schedule s;
  std::vector<Int64> chunk;
  std::vector<std::size_t> begins;
  std::vector<std::vector<int>> held;  // by node, its pieces
  std::vector<Node> nodes;
  int steps = 0;
};

}  // namespace

Schedule make_schedule(const std::vector<Int64>& lengths, const Mask& mask, const Partition& partition,
                       const Settings& settings) {
  return Maker(lengths, mask, partition, settings).make();
}

bool sees(const Schedule& schedule, const Piece& query, const Piece& key) {
  if (query.rows.sequence != key.rows.sequence) return false;
  const BandMask band = schedule.mask.band(schedule.lengths[index(query.rows.sequence)]);
  const Range keys = visible_keys(band, {query.rows.begin, query.rows.end});
  return !keys.empty() && key.rows.begin < keys.end && keys.begin < key.rows.end;
}

std::vector<Leaves> shares(const Schedule& schedule, int node, const Piece& key) {
  std::vector<Leaves> out;
  if (schedule.settings.segment == 0) return {{0, 0}};
  const auto first = std::partition_point(schedule.pieces.begin(), schedule.pieces.end(),
                                          [&](const Piece& p) { return p.rows.sequence < key.rows.sequence; });
  for (auto p = first; p != schedule.pieces.end() && p->rows.sequence == key.rows.sequence;) {
    if (p->node != node) {
      ++p;
      continue;
    }
    auto end = p;  // of the run of leaves that the node holds
    while (end != schedule.pieces.end() && end->rows.sequence == key.rows.sequence && end->node == node) ++end;
    while (p != end) {
      const Int64 alignment = p->leaf == 0 ? Int64(1) << 62 : p->leaf & -p->leaf;
      Int64 size = 1;
      while (2 * size <= lesser(alignment, end - p)) size *= 2;
      if (std::any_of(p, p + size, [&](const Piece& q) { return sees(schedule, q, key); }))
        out.push_back({p->leaf, p->leaf + size});
      p += size;
    }
  }
  return out;
}

}  // namespace tessera::dist
