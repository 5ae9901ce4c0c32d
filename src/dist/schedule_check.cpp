// SPDX-License-Identifier: Apache-2.0
// The judge of schedules; see check_schedule in schedule.hpp. It replays the steps of every rank and knows nothing of
// how they were made.
#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <tuple>
#include <utility>

#include "dist/schedule.hpp"

namespace tessera::dist {
namespace {

std::size_t index(Int64 x) { return static_cast<std::size_t>(x); }

struct Fault {
  std::string sentence;
};

template <class... Parts>
[[noreturn]] void fault(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Fault{text.str()};
}

const char* name(What what) {
  switch (what) {
    case What::heads:
      return "heads";
    case What::keys:
      return "keys";
    case What::gradients:
      return "gradients";
    case What::sums:
      return "sums";
    default:
      return "results";
  }
}

bool by_position(const Span& a, const Span& b) {
  return std::pair(a.sequence, a.begin) < std::pair(b.sequence, b.begin);
}

// Do these spans hold every row of every sequence once?
void check_cover(std::vector<Span> spans, const std::vector<Int64>& lengths, const char* whose) {
  std::sort(spans.begin(), spans.end(), by_position);
  std::vector<Int64> reached(lengths.size());
  for (const Span& s : spans) {
    if (s.sequence < 0 || s.sequence >= Int64(lengths.size()) || s.rows() <= 0)
      fault("the ", whose, " hold rows ", s.begin, " to ", s.end, " of sequence ", s.sequence, ", which is no span");
    Int64& at = reached[index(s.sequence)];
    if (s.begin != at)
      fault("the ", whose, " hold row ", lesser(at, s.begin), " of sequence ", s.sequence,
            s.begin < at ? " twice" : " never");
    at = s.end;
  }
  for (std::size_t b = 0; b < lengths.size(); ++b)
    if (reached[b] != lengths[b]) fault("the ", whose, " hold row ", reached[b], " of sequence ", b, " never");
}

// What lies in a rank's memory for keys: which key in each row.
class KeyMemory {
 public:
  KeyMemory(const Schedule& s, int rank) : rank(rank), rows(s.of[index(rank)].slot_rows) {}

  void put_own(const Schedule& s) {
    const std::vector<Span> own = node_rows(s.partition, s.node_of(rank));
    const std::vector<Int64>& home = s.of[index(rank)].home;
    if (home.size() != own.size())
      fault("rank ", rank, ": has places for ", home.size(), " of its ", own.size(), " spans");
    for (std::size_t i = 0; i < own.size(); ++i) put(own[i], home[i]);
  }

  Range place(const Span& keys, Int64 at) const {
    const Range r{at, at + keys.rows()};
    if (at < 0 || r.end > rows)
      fault("rank ", rank, ": rows ", r.begin, " to ", r.end, " are outside of its memory for ", rows);
    return r;
  }

  void require(const Span& keys, Int64 at, int step, const char* use) const {
    const Range r = place(keys, at);
    auto run = held.upper_bound(r.begin);
    if (run != held.begin()) --run;
    for (Int64 row = r.begin; row < r.end; row = run->second.end, ++run)
      if (run == held.end() || run->first > row || run->second.end <= row || run->second.sequence != keys.sequence ||
          run->second.shift + row != keys.begin + row - at)
        fault("rank ", rank, ", step ", step, ": ", use, " key ", keys.begin + row - at, " of sequence ", keys.sequence,
              " in row ", row, ", which does not hold it");
  }

  // Whatever lay in these rows is gone.
  void put(const Span& keys, Int64 at) {
    const Range r = place(keys, at);
    auto run = held.upper_bound(r.begin);
    if (run != held.begin() && std::prev(run)->second.end > r.begin) --run;
    while (run != held.end() && run->first < r.end) {
      const auto [begin, old] = *run;
      run = held.erase(run);
      if (begin < r.begin) held[begin] = {r.begin, old.sequence, old.shift};
      if (old.end > r.end) run = held.insert({r.end, old}).first;
    }
    held[r.begin] = {r.end, keys.sequence, keys.begin - at};
  }

 private:
  struct Held {
    Int64 end, sequence, shift;  // shift: key less row
  };
  int rank;
  Int64 rows;
  std::map<Int64, Held> held;  // by first row
};

// One rank's steps, replayed.
class Replay {
 public:
  Replay(const Schedule& s, int rank) : s(s), rank(rank), node(s.node_of(rank)), memory(s, rank) {}

  void run() {
    const std::vector<Step>& steps = s.of[index(rank)].steps;
    const std::size_t ahead = index(s.ahead);
    for (std::size_t t = 0; t < steps.size(); ++t) {
      const int step = static_cast<int>(t);
      if (t == (s.partition.slices > 1 ? ahead : 0)) memory.put_own(s);  // before, heads are under way
      if (t >= ahead)
        for (const Transfer& x : steps[t - ahead].group)
          if (x.what == What::keys && !x.send) memory.put(x.rows, x.at);
      for (const Work& w : steps[t].work) work(w, step);
      for (const Transfer& x : steps[t].group) {
        if (x.what != What::keys)
          other(x, step, t + 1 == steps.size());
        else if (x.send)
          memory.require(x.rows, x.at, step, "sends");
        else
          memory.place(x.rows, x.at);
      }
      // In this step, all groups may be under way from the first for which it did not wait.
      std::vector<Range> used, written;
      for (const Work& w : steps[t].work) used.push_back({w.at, w.at + w.keys.size()});
      for (std::size_t u = t + 1 - std::min(t + 1, ahead); u <= t; ++u)
        for (const Transfer& x : steps[u].group)
          if (x.what == What::keys) (x.send ? used : written).push_back(memory.place(x.rows, x.at));
      apart(used, written, step);
    }
    covered();
    exchanged();
    returned();
  }

  double pairs = 0;

 private:
  const Span& rows(int piece) const { return s.pieces[index(piece)].rows; }
  BandMask band(int piece) const { return s.mask.band(s.lengths[index(rows(piece).sequence)]); }

  void work(const Work& w, int step) {
    const Span keys{rows(w.query).sequence, w.keys.begin, w.keys.end};
    memory.require(keys, w.at, step, "works on");
    if (s.pieces[index(w.query)].node != node)
      fault("rank ", rank, ", step ", step, ": works on queries of piece ", w.query, ", which node ",
            s.pieces[index(w.query)].node, " holds");
    const Range seen = keys_seen(s, s.pieces[index(w.query)]);
    if (w.keys.begin >= seen.end || w.keys.end <= seen.begin)
      fault("rank ", rank, ", step ", step, ": piece ", w.query, " sees nothing of keys ", w.keys.begin, " to ",
            w.keys.end);
    std::vector<Done>& before = done[w.query];
    if (s.settings.scheme == Scheme::gather && !before.empty() && before.back().keys.begin > w.keys.begin)
      fault("rank ", rank, ", step ", step, ": piece ", w.query, " sees key ", w.keys.begin, " after ",
            before.back().keys.begin, ", against the order of keys");
    before.push_back({w.keys, step});
  }

  void other(const Transfer& x, int step, bool is_last) {
    if (x.what == What::gradients || x.what == What::sums) {
      if (s.settings.pass == Pass::forward) fault("rank ", rank, ", step ", step, ": gradients in a forward pass");
      memory.place(x.rows, x.at);
      (x.what == What::sums ? sums : gradients)[x.send].push_back({x, step});
      return;
    }
    if (s.node_of(x.peer) != node || x.peer == rank || (x.what == What::heads ? step != 0 : !is_last))
      fault("rank ", rank, ", step ", step, ": exchanges ", name(x.what), " with rank ", x.peer, " out of place");
    ++exchanges[{x.what, x.send, x.peer}];
  }

  // What is written must be nothing that is read meanwhile, nor be written twice.
  void apart(std::vector<Range>& used, std::vector<Range>& written, int step) const {
    const auto order = [](const Range& a, const Range& b) { return a.begin < b.begin; };
    std::sort(used.begin(), used.end(), order);
    std::sort(written.begin(), written.end(), order);
    for (std::size_t i = 1; i < written.size(); ++i)
      if (written[i - 1].end > written[i].begin)
        fault("rank ", rank, ", step ", step, ": two pieces arrive in row ", written[i].begin);
    std::size_t w = 0;
    for (const Range& u : used) {
      while (w < written.size() && written[w].end <= u.begin) ++w;
      if (w < written.size() && written[w].begin < u.end)
        fault("rank ", rank, ", step ", step, ": row ", greater(written[w].begin, u.begin), " is overwritten in use");
    }
  }

  // Every tile of queries sees all its keys, each once.
  void covered() {
    for (std::size_t p = 0; p < s.pieces.size(); ++p) {
      if (s.pieces[p].node != node) continue;
      const int query = static_cast<int>(p);
      std::vector<Range> seen;
      for (const Done& w : done[query]) seen.push_back(w.keys);
      std::sort(seen.begin(), seen.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
      for (std::size_t i = 1; i < seen.size(); ++i)
        if (seen[i].begin < seen[i - 1].end) fault("rank ", rank, ": piece ", p, " sees key ", seen[i].begin, " twice");
      const Span& own = rows(query);
      std::size_t from = 0;  // no later tile sees an earlier key
      for (Int64 begin = own.begin; begin < own.end; begin += tile) {
        const Range needed = visible_keys(band(query), {begin, lesser(begin + tile, own.end)});
        if (needed.empty()) continue;
        while (from < seen.size() && seen[from].end <= needed.begin) ++from;
        Int64 at = needed.begin;
        for (std::size_t k = from; k < seen.size() && seen[k].begin <= at && at < needed.end; ++k) at = seen[k].end;
        if (at < needed.end)
          fault("rank ", rank, ": query ", begin, " of sequence ", own.sequence, " never sees key ", at);
      }
      pairs += visible_pairs(band(query), own.begin, own.end);
    }
  }

  void exchanged() const {
    for (int u = 0; u < s.partition.slices; ++u)
      for (const What what : {What::heads, What::results})
        for (const bool send : {true, false}) {
          const int peer = s.rank_of(node, u);
          const auto found = exchanges.find({what, send, peer});
          if (peer != rank && (found == exchanges.end() || found->second != 1))
            fault("rank ", rank, ": exchanges ", name(what), " with rank ", peer, " not once");
        }
  }

  // Every query piece's share of dK and dV leaves once, after the work, or is part of this rank's sum. A sum that other
  // rows' owners wait for leaves once, when all its shares are there. As sends match receives, every share then comes
  // to the owner once.
  void returned() {
    if (s.settings.pass == Pass::forward) return;
    for (auto* list : {&gradients[0], &gradients[1], &sums[0], &sums[1]})
      std::sort(list->begin(), list->end(), [](const Moved& a, const Moved& b) { return a.key() < b.key(); });
    for (const Moved& x : sums[true]) {
      const Piece& piece = piece_of(x);
      if (s.rank_of(piece.node, s.slice_of(rank)) != x.transfer.peer)
        fault("rank ", rank, ", step ", x.step, ": sends the sum of key ", x.transfer.rows.begin, " of sequence ",
              x.transfer.rows.sequence, " to rank ", x.transfer.peer, ", which does not hold it");
      if (piece.node == node) fault("rank ", rank, ", step ", x.step, ": sends a sum of rows that it holds");
    }
    check_once(sums[true], "sends the sum of key ");
    check_once(sums[false], "receives the sum of key ");
    for (const Moved& x : gradients[false]) {
      const Int64 at = kept_until(x.transfer.rows, x.step + s.ahead);
      if (at < x.transfer.rows.end) lost(x.transfer.rows.sequence, at);
    }
    for (const auto& [query, works] : done)
      for (const Done& w : works) returned(query, w);
  }

  struct Done {
    Range keys;
    int step;
  };
  struct Moved {
    Transfer transfer;
    int step;
    std::pair<Int64, Int64> key() const { return {transfer.rows.sequence, transfer.rows.begin}; }
  };

  const Piece& piece_of(const Moved& x) const {
    const int p = piece_at(s, x.transfer.rows.sequence, x.transfer.rows.begin);
    if (index(p) >= s.pieces.size() || rows(p).end < x.transfer.rows.end)
      fault("rank ", rank, ", step ", x.step, ": returns rows of several pieces at once");
    return s.pieces[index(p)];
  }

  [[noreturn]] void lost(Int64 sequence, Int64 key) const {
    fault("rank ", rank, ": never returns the gradients of key ", key, " of sequence ", sequence);
  }

  void check_once(const std::vector<Moved>& list, const char* what) const {
    for (std::size_t i = 1; i < list.size(); ++i) {
      const Span &a = list[i - 1].transfer.rows, &b = list[i].transfer.rows;
      if (a.sequence == b.sequence && a.end > b.begin)
        fault("rank ", rank, ": ", what, b.begin, " of sequence ", b.sequence, " twice");
    }
  }

  // The part of a list that touches these keys; entries do not nest.
  template <class Fn>
  void for_touching(const std::vector<Moved>& list, const Span& keys, Fn fn) const {
    auto x = std::lower_bound(list.begin(), list.end(), std::pair(keys.sequence, keys.begin),
                              [](const Moved& m, const auto& key) { return m.key() < key; });
    // Entries that begin before may reach into them; those of a piece begin at most its rows before.
    const Int64 first = rows(piece_at(s, keys.sequence, keys.begin)).begin;
    while (x != list.begin() && std::prev(x)->key() >= std::pair(keys.sequence, first)) --x;
    for (; x != list.end() && x->key() < std::pair(keys.sequence, keys.end); ++x)
      if (x->transfer.rows.end > keys.begin) fn(*x);
  }

  // Of these keys, the first whose sum does not stay at the node that holds them, nor leaves for it from group `ready`
  // on: their end, if there is none.
  Int64 kept_until(const Span& keys, int ready) const {
    Int64 at = keys.begin;
    while (at < keys.end) {
      const Piece& piece = s.pieces[index(piece_at(s, keys.sequence, at))];
      Int64 next = at;
      if (piece.node == node) {
        next = piece.rows.end;
        for_touching(sums[false], {keys.sequence, at, lesser(next, keys.end)}, [&](const Moved& x) {
          fault("rank ", rank, ": receives the sum of key ", x.transfer.rows.begin, " of sequence ", keys.sequence,
                " without the shares that it has itself");
        });
      } else {
        for_touching(sums[true], {keys.sequence, at, at + 1}, [&](const Moved& x) {
          next = x.transfer.rows.end;
          if (x.step < ready)
            fault("rank ", rank, ", step ", x.step, ": sends the sum of key ", at, " of sequence ", keys.sequence,
                  " before all shares are there");
        });
        if (next == at) return at;
      }
      at = next;
    }
    return keys.end;
  }

  void returned(int query, const Done& w) const {
    const Int64 leaf = s.pieces[index(query)].leaf, sequence = rows(query).sequence;
    Int64 at = w.keys.begin;
    const auto stays = [&](Int64 end) {
      if (at >= end) return;
      const Int64 until = kept_until({sequence, at, end}, w.step + 1);
      if (until < end) lost(sequence, until);
    };
    for_touching_pieces(w.keys, sequence, [&](const Moved& x) {
      const Transfer& t = x.transfer;
      if (!(t.first == 0 && t.last == 0) && (leaf < t.first || t.last <= leaf)) return;
      if (x.step <= w.step)
        fault("rank ", rank, ", step ", x.step, ": returns gradients of key ", greater(at, t.rows.begin),
              " of sequence ", sequence, " before its last work");
      if (greater(t.rows.begin, w.keys.begin) < at)
        fault("rank ", rank, ": returns gradients of key ", greater(t.rows.begin, w.keys.begin), " of sequence ",
              sequence, " for piece ", query, " twice");
      stays(t.rows.begin);
      at = t.rows.end;
    });
    stays(w.keys.end);
  }

  // Gradients that leave, for all pieces of these keys.
  template <class Fn>
  void for_touching_pieces(Range keys, Int64 sequence, Fn fn) const {
    for (int p = piece_at(s, sequence, keys.begin);
         index(p) < s.pieces.size() && rows(p).sequence == sequence && rows(p).begin < keys.end; ++p)
      for_touching(gradients[true], {sequence, greater(keys.begin, rows(p).begin), lesser(keys.end, rows(p).end)}, fn);
  }

 public:
  Int64 tile = 1;

 private:
  const Schedule& s;
  int rank, node;
  KeyMemory memory;
  std::map<int, std::vector<Done>> done;     // by query piece, in the order of work
  std::vector<Moved> gradients[2], sums[2];  // received and sent
  std::map<std::tuple<What, bool, int>, int> exchanges;
};

// Sends of each step against receives, between every two ranks, in order.
void check_matches(const Schedule& s) {
  const std::size_t steps = s.of.empty() ? 0 : s.of[0].steps.size();
  using Message = std::tuple<What, Int64, Int64, Int64, Int64, Int64>;
  for (std::size_t r = 0; r < s.of.size(); ++r)
    if (s.of[r].steps.size() != steps) fault("rank ", r, " has ", s.of[r].steps.size(), " steps, rank 0 has ", steps);
  for (std::size_t t = 0; t < steps; ++t) {
    std::map<std::pair<int, int>, std::pair<std::vector<Message>, std::vector<Message>>> links;
    for (std::size_t r = 0; r < s.of.size(); ++r)
      for (const Transfer& x : s.of[r].steps[t].group) {
        const int me = static_cast<int>(r);
        if (x.peer < 0 || index(x.peer) >= s.of.size() || x.peer == me)
          fault("rank ", me, ", step ", t, ": there is no peer ", x.peer);
        auto& link = links[x.send ? std::pair(me, x.peer) : std::pair(x.peer, me)];
        (x.send ? link.first : link.second)
            .push_back({x.what, x.rows.sequence, x.rows.begin, x.rows.end, x.first, x.last});
      }
    for (const auto& [ends, link] : links)
      if (link.first != link.second)
        fault("step ", t, ": what rank ", ends.first, " sends to rank ", ends.second, " is not what that one receives");
  }
}

}  // namespace

Judgement check_schedule(const Schedule& s, Int64 tile) {
  Judgement judgement;
  try {
    std::vector<Span> all, cut;
    for (const std::vector<Span>& spans : s.partition.of) all.insert(all.end(), spans.begin(), spans.end());
    for (const Piece& piece : s.pieces) cut.push_back(piece.rows);
    check_cover(all, s.lengths, "ranks");
    check_cover(cut, s.lengths, "pieces");
    check_matches(s);
    double sum = 0, most = 0;
    for (int rank = 0; rank < s.partition.ranks(); ++rank) {
      Replay replay(s, rank);
      replay.tile = tile;
      replay.run();
      sum += replay.pairs, most = std::max(most, replay.pairs);
    }
    if (most > 0) judgement.balance = sum / most / s.partition.ranks();
  } catch (const Fault& found) {
    judgement.fault = found.sentence;
  }
  return judgement;
}

}  // namespace tessera::dist
