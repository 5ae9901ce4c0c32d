// SPDX-License-Identifier: Apache-2.0
// What schedules of both schemes have in common: pieces, the exchange of heads, shares of gradients; see schedule.hpp.
#include "dist/schedule.hpp"

#include <algorithm>
#include <utility>

#include "dist/schedule_make.hpp"
#include "tessera/tessera.hpp"

namespace tessera::dist {
namespace {

std::size_t index(Int64 x) { return static_cast<std::size_t>(x); }

// The rows of all nodes in pieces, by sequence and position.
void cut_pieces(Draft& d) {
  Schedule& s = d.s;
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
      d.chunk.push_back(number);
      begin = end;
    }
    ++number;
  }
  d.begins.assign(s.lengths.size() + 1, s.pieces.size());
  for (std::size_t p = s.pieces.size(); p-- > 0;) d.begins[index(s.pieces[p].rows.sequence)] = p;
  for (std::size_t b = s.lengths.size(); b-- > 0;) d.begins[b] = std::min(d.begins[b], d.begins[b + 1]);
  d.held.resize(index(s.partition.nodes()));
  for (std::size_t p = 0; p < s.pieces.size(); ++p) d.held[index(s.pieces[p].node)].push_back(static_cast<int>(p));
}

// As many steps on every rank, less those at either end in which nobody does anything.
void even_out(Schedule& s) {
  std::size_t end = 0;
  for (const RankSchedule& r : s.of) end = std::max(end, r.steps.size());
  for (RankSchedule& r : s.of) r.steps.resize(end);
  const auto idle = [&](std::size_t step) {
    return std::all_of(s.of.begin(), s.of.end(), [&](const RankSchedule& r) {
      return r.steps[step].group.empty() && r.steps[step].work.empty();
    });
  };
  std::size_t begin = 0;
  while (begin < end && idle(begin)) ++begin;
  while (begin < end && idle(end - 1)) --end;
  for (RankSchedule& r : s.of)
    r.steps = {std::make_move_iterator(r.steps.begin() + static_cast<std::ptrdiff_t>(begin)),
               std::make_move_iterator(r.steps.begin() + static_cast<std::ptrdiff_t>(end))};
}

void exchange_heads(Schedule& s) {
  for (int rank = 0; rank < s.partition.ranks(); ++rank) {
    std::vector<Step> first(index(s.ahead));
    Step last;
    for (int u = 0; u < s.partition.slices; ++u) {
      const int peer = s.rank_of(s.node_of(rank), u);
      if (peer == rank) continue;
      for (const bool send : {true, false}) {
        first[0].group.push_back({.what = What::heads, .send = send, .peer = peer});
        last.group.push_back({.what = What::results, .send = send, .peer = peer});
      }
    }
    std::vector<Step>& steps = s.of[index(rank)].steps;
    steps.insert(steps.begin(), std::make_move_iterator(first.begin()), std::make_move_iterator(first.end()));
    steps.push_back(std::move(last));
  }
}

}  // namespace

Step& Draft::step(int rank, int number) {
  std::vector<Step>& steps = s.of[index(rank)].steps;
  if (steps.size() <= index(number)) steps.resize(index(number) + 1);
  return steps[index(number)];
}

void Draft::transfer(int number, int from, int to, Transfer t, Int64 at_from, Int64 at_to) {
  for (int u = 0; u < s.partition.slices; ++u) {
    const int a = s.rank_of(from, u), b = s.rank_of(to, u);
    t.send = true, t.peer = b, t.at = at_from;
    step(a, number).group.push_back(t);
    t.send = false, t.peer = a, t.at = at_to;
    step(b, number).group.push_back(t);
  }
}

void Draft::work(int number, int node, const Work& w) {
  for (int u = 0; u < s.partition.slices; ++u) step(s.rank_of(node, u), number).work.push_back(w);
}

Schedule make_schedule(const std::vector<Int64>& lengths, const Mask& mask, const Partition& partition,
                       const Settings& settings) {
  if (settings.segment > 0 && settings.scheme != Scheme::gather)
    throw Error(TESSERA_INVALID_ARGUMENT, "segment: is " + std::to_string(settings.segment) +
                                              "; a ring's bits depend on the number of ranks, so it must be 0 there");
  Draft d;
  d.s.settings = settings, d.s.partition = partition, d.s.lengths = lengths, d.s.mask = mask;
  d.s.of.resize(index(partition.ranks()));
  cut_pieces(d);
  settings.scheme == Scheme::ring ? make_ring(d) : make_gather(d);
  even_out(d.s);
  if (partition.slices > 1) exchange_heads(d.s);
  return std::move(d.s);
}

Range keys_seen(const Schedule& schedule, const Piece& query) {
  const BandMask band = schedule.mask.band(schedule.lengths[index(query.rows.sequence)]);
  return visible_keys(band, {query.rows.begin, query.rows.end});
}

int piece_at(const Schedule& schedule, Int64 sequence, Int64 row) {
  const auto found = std::partition_point(schedule.pieces.begin(), schedule.pieces.end(), [&](const Piece& p) {
    return std::pair(p.rows.sequence, p.rows.end) <= std::pair(sequence, row);
  });
  return static_cast<int>(found - schedule.pieces.begin());
}

std::vector<Leaves> shares(const Schedule& schedule, int node, const Piece& key) {
  std::vector<Leaves> out;
  if (schedule.settings.segment == 0) return {{0, 0}};
  const auto sees = [&](const Piece& query) {
    return !common(keys_seen(schedule, query), {key.rows.begin, key.rows.end}).empty();
  };
  const auto first = schedule.pieces.begin() + piece_at(schedule, key.rows.sequence, 0);
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
      if (std::any_of(p, p + size, sees)) out.push_back({p->leaf, p->leaf + size});
      p += size;
    }
  }
  return out;
}

}  // namespace tessera::dist
