// SPDX-License-Identifier: Apache-2.0
// The ordered gather: keys arrive in ascending order and stay. See schedule.hpp.
//
// Work comes in slots of equal work, so that ranks which walk through the keys at different speeds reach the ends of
// steps together. Nobody sends a piece to everybody: its parts are dealt to the nodes that need it, who pass them on to
// each other, and who sum the gradients of their part. So every link carries every row about once.
#include <algorithm>
#include <array>
#include <bit>
#include <climits>
#include <cmath>

#include "dist/schedule_make.hpp"

namespace tessera::dist {
namespace {

std::size_t index(Int64 x) { return static_cast<std::size_t>(x); }

constexpr Int64 least_part = 64;         // rows: smaller messages cost their latency
constexpr int least_parts = 8;           // of a long piece, so that a slot's keys come from everybody
constexpr double largest_slot = 1. / 8;  // of a node's work: what is under way beside it is as large

// The ends of slots, as shares of a node's work. The first is small, as nobody works before its keys are there; in the
// backward pass so is the last, whose gradients travel when nobody works any more. Each is at most twice its neighbour.
std::vector<double> slot_ends(int nodes, Pass pass, Int64 blocks) {
  std::vector<double> sizes, fall;
  if (nodes == 1 || blocks <= 1) return {1};
  double left = 1;
  for (double size = std::min(0.25 / nodes, 1. / 64); size < largest_slot; size *= 2) {
    sizes.push_back(size), left -= size;
    if (pass == Pass::backward) fall.push_back(size), left -= size;
  }
  if (left < 0) sizes.clear(), fall.clear(), left = 1;
  const int equal = static_cast<int>(std::ceil(left / largest_slot - 1e-9));
  sizes.insert(sizes.end(), index(equal), left / equal);
  sizes.insert(sizes.end(), fall.rbegin(), fall.rend());
  if (Int64(sizes.size()) > blocks) sizes.assign(index(blocks), 1 / double(blocks));
  std::vector<double> ends;
  double sum = 0;
  for (const double size : sizes) ends.push_back(sum += size);
  return ends;
}

// Keys that a node works with, neighbours, and its queries that see some of them.
struct Zone {
  Int64 sequence = 0;
  Range keys{};
  std::vector<int> queries;
};

struct Cut {
  std::size_t zone = 0;
  Int64 key = 0;
};

struct Node {
  std::vector<Zone> zones;  // ascending
  std::vector<Cut> cuts;    // where slots begin; one more at the end
  std::vector<int> pieces;  // in its memory, ascending
  std::vector<Int64> rows;  // where these begin
};

// Rows of a piece that one node passes on, and whose gradients it sums.
struct Part {
  int piece = 0, keeper = 0;
  Range rows{};
  int takers = 0;            // nodes that need it and do not hold it
  int first_slot = INT_MAX;  // in which anybody needs it
  int summed = -1;           // the first group that can send the sum; -1: nobody has gradients for it
};

// Keys on their way from one node to another.
struct Parcel {
  int group = 0, from = 0, to = 0, piece = 0;
  Range rows{};
  bool straight = false;  // from who holds them to who uses them: an earlier group would do
};

class Gather {
 public:
  explicit Gather(Draft& d) : d(d), s(d.s), nodes(index(d.nodes())) {}

  void make() {
    s.ahead = 2;
    Int64 blocks = 0;
    for (int n = 0; n < d.nodes(); ++n) {
      look(n);
      Int64 mine = 0;
      for (const Zone& zone : nodes[index(n)].zones) mine += ceil_div(zone.keys.size(), grain());
      blocks = greater(blocks, mine);
    }
    ends = slot_ends(d.nodes(), s.settings.pass, blocks);
    for (int n = 0; n < d.nodes(); ++n) cut(nodes[index(n)]), place(n);
    deal_parts();
    for (int n = 0; n < d.nodes(); ++n) plan_work(n);
    bring_keys();
    if (s.settings.pass == Pass::backward) return_gradients();
  }

 private:
  // A slot's keys travel in group slot + ahead, after they were dealt; its work is as many steps later.
  int keys_step(int slot) const { return slot + s.ahead; }
  int work_step(int slot) const { return slot + 2 * s.ahead; }
  // Slots are cut on multiples of this. With segments it is one of theirs: the same on any number of ranks.
  Int64 grain() const {
    const Int64 segment = s.settings.segment, grain = s.settings.grain;
    if (segment == 0) return grain;
    return s.settings.pass == Pass::backward ? segment : ceil_div(grain, segment) * segment;
  }
  static Int64 ceil_div(Int64 a, Int64 b) { return (a + b - 1) / b; }

  // What a query piece works with: what it sees, from a cut on, and as whole pieces where these are the segments.
  Range keys_of(int query) const {
    const Span& rows = d.piece(query).rows;
    const Range seen = keys_seen(s, d.piece(query));
    if (seen.empty()) return {};
    const Span& first = d.piece(piece_at(s, rows.sequence, seen.begin)).rows;
    const Span& last = d.piece(piece_at(s, rows.sequence, seen.end - 1)).rows;
    if (s.settings.segment > 0) return {first.begin, last.end};
    return {greater(first.begin, seen.begin / grain() * grain()), seen.end};
  }

  void look(int n) {
    std::vector<Zone>& zones = nodes[index(n)].zones;
    std::vector<Zone> each;
    for (const int q : d.held[index(n)])
      if (const Range keys = keys_of(q); !keys.empty()) each.push_back({d.piece(q).rows.sequence, keys, {q}});
    std::sort(each.begin(), each.end(), [](const Zone& a, const Zone& b) {
      return std::pair(a.sequence, a.keys.begin) < std::pair(b.sequence, b.keys.begin);
    });
    for (Zone& zone : each) {
      if (zones.empty() || zones.back().sequence != zone.sequence || zones.back().keys.end < zone.keys.begin) {
        zones.push_back(std::move(zone));
        continue;
      }
      zones.back().keys.end = greater(zones.back().keys.end, zone.keys.end);
      zones.back().queries.push_back(zone.queries[0]);
    }
    for (Zone& zone : zones) std::sort(zone.queries.begin(), zone.queries.end());
  }

  // Visible pairs of the zone's queries with its keys before `end`.
  double pairs(const Zone& zone, Int64 end) const {
    BandMask band = s.mask.band(s.lengths[index(zone.sequence)]);
    band.keys = end;
    double sum = 0;
    for (const int q : zone.queries) sum += visible_pairs(band, d.piece(q).rows.begin, d.piece(q).rows.end);
    return sum;
  }

  // Cuts on multiples of the grain, nearest to equal shares of the node's work.
  void cut(Node& n) const {
    std::vector<double> before{0};  // pairs of the zones before
    for (const Zone& zone : n.zones) before.push_back(before.back() + pairs(zone, zone.keys.end));
    if (n.zones.empty()) return;
    n.cuts.push_back({0, n.zones[0].keys.begin});
    for (std::size_t i = 0; i + 1 < ends.size(); ++i) {
      const double target = ends[i] * before.back();
      std::size_t z = 0;
      while (z + 1 < n.zones.size() && before[z + 1] < target) ++z;
      const Zone& zone = n.zones[z];
      const auto work = [&](Int64 block) {
        return before[z] + pairs(zone, clamp(block * grain(), zone.keys.begin, zone.keys.end));
      };
      Int64 low = zone.keys.begin / grain(), high = ceil_div(zone.keys.end, grain());  // work(low) <= target
      while (low + 1 < high) {
        const Int64 middle = (low + high) / 2;
        (work(middle) <= target ? low : high) = middle;
      }
      const Int64 block = target - work(low) <= work(high) - target ? low : high;
      n.cuts.push_back({z, clamp(block * grain(), zone.keys.begin, zone.keys.end)});
    }
    n.cuts.push_back({n.zones.size() - 1, n.zones.back().keys.end});
  }

  // fn(zone, keys) for the keys of one slot.
  template <class Fn>
  void for_slot(const Node& n, std::size_t slot, Fn fn) const {
    if (n.zones.empty()) return;
    const Cut &begin = n.cuts[slot], &end = n.cuts[slot + 1];
    for (std::size_t z = begin.zone; z <= end.zone; ++z) {
      const Zone& zone = n.zones[z];
      const Range keys{z == begin.zone ? begin.key : zone.keys.begin, z == end.zone ? end.key : zone.keys.end};
      if (!keys.empty()) fn(zone, keys);
    }
  }

  // The node's own pieces and those that it works with, in ascending order: neighbours lie side by side.
  void place(int number) {
    Node& n = nodes[index(number)];
    n.pieces = d.held[index(number)];
    for (const Zone& zone : n.zones) d.for_pieces(zone.sequence, zone.keys, [&](int p) { n.pieces.push_back(p); });
    std::sort(n.pieces.begin(), n.pieces.end());
    n.pieces.erase(std::unique(n.pieces.begin(), n.pieces.end()), n.pieces.end());
    RankSchedule r;
    for (const int p : n.pieces) n.rows.push_back(r.slot_rows), r.slot_rows += d.piece(p).rows.rows();
    for (const Span& span : node_rows(s.partition, number)) r.home.push_back(row(n, span.sequence, span.begin));
    for (int u = 0; u < s.partition.slices; ++u) {
      RankSchedule& rank = s.of[index(s.rank_of(number, u))];
      rank.home = r.home, rank.slot_rows = r.slot_rows;
    }
  }

  // Where a key lies in the memory of a node.
  Int64 row(const Node& n, Int64 sequence, Int64 key) const {
    const int p = piece_at(s, sequence, key);
    const auto at = std::lower_bound(n.pieces.begin(), n.pieces.end(), p) - n.pieces.begin();
    return n.rows[index(at)] + key - d.piece(p).rows.begin;
  }

  // The pieces of others in parts. What is needed first comes from as many nodes as there are, and later pieces from
  // fewer each, as a slot holds many of them.
  void deal_parts() {
    std::vector<std::vector<int>> needed(s.pieces.size());  // by piece, the nodes that have it in their memory
    for (int n = 0; n < d.nodes(); ++n)
      for (const int p : nodes[index(n)].pieces) needed[index(p)].push_back(n);
    std::vector<Int64> load(nodes.size());  // rows that a node has to pass on, times receivers
    const auto least_loaded = [&](const std::vector<int>& who, Int64 rows) {
      const int n =
          *std::min_element(who.begin(), who.end(), [&](int a, int b) { return load[index(a)] < load[index(b)]; });
      load[index(n)] += rows * static_cast<Int64>(who.size());
      return n;
    };
    for (int p = 0; p < static_cast<int>(s.pieces.size()); ++p) {
      part_begins.push_back(parts.size());
      const Span& rows = d.piece(p).rows;
      const std::vector<int>& who = needed[index(p)];
      const auto all = static_cast<Int64>(who.size());
      const int range = std::bit_width(static_cast<UInt64>(d.chunk[index(p)]));  // chunks 0, 1, 2 to 3, 4 to 7 ...
      const Int64 most = lesser(all, greater(least_parts, all >> (range > 1 ? range - 1 : 0)));
      const Int64 each = greater(least_part, ceil_div(rows.rows(), most));
      const bool whole = each >= rows.rows();
      for (Int64 begin = rows.begin; begin < rows.end; begin += each) {
        const Range part{begin, lesser(begin + each, rows.end)};
        parts.push_back({p, whole ? d.piece(p).node : least_loaded(who, part.size()), part, int(all) - 1});
      }
    }
    part_begins.push_back(parts.size());
  }

  // fn(part, rows of it) for some keys.
  template <class Fn>
  void for_parts(Int64 sequence, Range keys, Fn fn) {
    d.for_pieces(sequence, keys, [&](int p) {
      for (std::size_t i = part_begins[index(p)]; i < part_begins[index(p) + 1]; ++i)
        if (const Range rows = common(parts[i].rows, keys); !rows.empty()) fn(parts[i], rows);
    });
  }

  void plan_work(int number) {
    const Node& n = nodes[index(number)];
    for (std::size_t slot = 0; slot < ends.size(); ++slot)
      for_slot(n, slot, [&](const Zone& zone, Range keys) {
        for (const int q : zone.queries) {
          const Range mine = common(keys_of(q), keys);
          if (mine.empty()) continue;
          const auto call = [&](Range r) {
            d.work(work_step(int(slot)), number, {q, r, row(n, zone.sequence, r.begin)});
          };
          if (s.settings.segment == 0) {
            call(mine);
            continue;
          }
          // The same calls everywhere: up to every cut that there may be.
          for (Int64 begin = mine.begin; begin < mine.end;) {
            const Int64 end = lesser(mine.end, (begin / grain() + 1) * grain());
            call({begin, end});
            begin = end;
          }
        }
        for_parts(zone.sequence, keys, [&](Part& part, Range) {
          part.first_slot = std::min(part.first_slot, int(slot));
          part.summed = std::max(part.summed, work_step(int(slot)) + 1 + (part.keeper == number ? 0 : s.ahead));
        });
      });
  }

  // A part goes to its keeper as many groups before another node needs it from there as a group may take, and to each
  // node that works with it as many steps before that.
  void bring_keys() {
    std::vector<Parcel> parcels;
    for (const Part& part : parts) {
      const int owner = d.piece(part.piece).node;
      if (part.keeper == owner || part.first_slot == INT_MAX) continue;
      const bool straight = part.takers == 1;
      const int group = straight ? keys_step(part.first_slot) : part.first_slot;
      parcels.push_back({group, owner, part.keeper, part.piece, part.rows, straight});
    }
    for (int number = 0; number < d.nodes(); ++number)
      for (std::size_t slot = 0; slot < ends.size(); ++slot)
        for_slot(nodes[index(number)], slot, [&](const Zone& zone, Range keys) {
          for_parts(zone.sequence, keys, [&](const Part& part, Range rows) {
            const int owner = d.piece(part.piece).node;
            if (part.keeper != number && owner != number)
              parcels.push_back({keys_step(int(slot)), part.keeper, number, part.piece, rows, part.keeper == owner});
          });
        });
    level(parcels);
    for (const Parcel& x : parcels) send(What::keys, x.group, x.from, x.to, x.piece, x.rows);
  }

  // Moves straight parcels to earlier groups, so that a link carries as much in every step as the step has work, or as
  // near to that as possible: with few nodes a link would be idle at first and too slow later.
  void level(std::vector<Parcel>& parcels) const {
    const int first = work_step(0), steps = work_step(int(ends.size()));
    std::vector<double> share(index(steps));  // of the work
    for (int t = first; t < steps; ++t)
      share[index(t)] = ends[index(t - first)] - (t > first ? ends[index(t - first) - 1] : 0);
    // Rows on the links out of and into each node, by group.
    std::vector<std::vector<double>> load(2 * nodes.size(), std::vector<double>(index(steps)));
    const auto links = [&](const Parcel& x) { return std::array{2 * index(x.from), 2 * index(x.to) + 1}; };
    for (const Parcel& x : parcels)
      for (const std::size_t link : links(x)) load[link][index(x.group)] += double(x.rows.size());
    std::vector<double> rate(load.size());  // rows for each share of the work
    for (std::size_t link = 0; link < load.size(); ++link) {
      double rows = 0, work = 0;
      for (int t = first; t < steps; ++t) {
        rows += load[link][index(t)], work += share[index(t)];
        rate[link] = std::max(rate[link], rows / work);
      }
      std::fill(load[link].begin(), load[link].end(), 0);
    }
    std::stable_sort(parcels.begin(), parcels.end(),
                     [](const Parcel& a, const Parcel& b) { return a.group > b.group; });
    for (Parcel& x : parcels) {
      const auto fits = [&](int t) {
        for (const std::size_t link : links(x))
          if (load[link][index(t)] + double(x.rows.size()) > rate[link] * share[index(t)]) return false;
        return true;
      };
      int t = x.group;
      while (x.straight && t >= first && !fits(t)) --t;
      if (t >= first) x.group = t;
      for (const std::size_t link : links(x)) load[link][index(x.group)] += double(x.rows.size());
    }
  }

  void return_gradients() {
    for (int number = 0; number < d.nodes(); ++number)
      for (std::size_t slot = 0; slot < ends.size(); ++slot)
        for_slot(nodes[index(number)], slot, [&](const Zone& zone, Range keys) {
          int last = -1;
          std::vector<Leaves> leaves;
          for_parts(zone.sequence, keys, [&](const Part& part, Range rows) {
            if (part.keeper == number) return;
            if (part.piece != last) leaves = shares(s, number, d.piece(part.piece)), last = part.piece;
            for (const Leaves& share : leaves)
              send(What::gradients, work_step(int(slot)) + 1, number, part.keeper, part.piece, rows, share);
          });
        });
    for (const Part& part : parts)
      if (part.keeper != d.piece(part.piece).node && part.summed >= 0)
        send(What::sums, part.summed, part.keeper, d.piece(part.piece).node, part.piece, part.rows);
  }

  void send(What what, int step, int from, int to, int piece, Range rows, Leaves share = {}) {
    const Int64 sequence = d.piece(piece).rows.sequence;
    d.transfer(step, from, to,
               {.what = what, .rows = {sequence, rows.begin, rows.end}, .first = share.first, .last = share.last},
               row(nodes[index(from)], sequence, rows.begin), row(nodes[index(to)], sequence, rows.begin));
  }

  Draft& d;
  Schedule& s;
  std::vector<Node> nodes;
  std::vector<double> ends;
  std::vector<Part> parts;  // by piece and row
  std::vector<std::size_t> part_begins;
};

}  // namespace

void make_gather(Draft& d) { Gather(d).make(); }

}  // namespace tessera::dist
