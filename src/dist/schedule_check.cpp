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

// What lies in a rank's memory for keys.
class KeyMemory {
 public:
  KeyMemory(const Schedule& s, int rank) :
      s(s), rank(rank), layout(s.of[index(rank)]), holds(layout.slot_row.size(), -1) {
    std::size_t slot = 0;
    for (std::size_t p = 0; p < s.pieces.size(); ++p)
      if (s.pieces[p].node == s.node_of(rank)) {
        if (slot >= holds.size() || layout.slot_row[slot] != s.pieces[p].at)
          fault("rank ", rank, ": slot ", slot, " is not where piece ", p, " of its own lies");
        put(static_cast<int>(slot++), static_cast<int>(p));
      }
  }

  Range rows(int slot, int piece) const {
    if (slot < 0 || index(slot) >= holds.size()) fault("rank ", rank, ": there is no slot ", slot);
    const Int64 begin = layout.slot_row[index(slot)];
    const Range r{begin, begin + s.pieces[index(piece)].rows.rows()};
    if (r.end > layout.slot_rows) fault("rank ", rank, ": slot ", slot, " is too small for piece ", piece);
    return r;
  }

  void require(int slot, int piece, int step, const char* use) const {
    rows(slot, piece);
    if (holds[index(slot)] != piece)
      fault("rank ", rank, ", step ", step, ": ", use, " piece ", piece, " in slot ", slot, ", which does not hold it");
  }

  // Whatever lay in these rows is gone.
  void put(int slot, int piece) {
    const Range r = rows(slot, piece);
    auto at = valid.upper_bound(r.begin);
    if (at != valid.begin() && std::prev(at)->second.end > r.begin) --at;
    while (at != valid.end() && at->first < r.end) holds[index(at->second.slot)] = -1, at = valid.erase(at);
    valid[r.begin] = {r.end, slot};
    holds[index(slot)] = piece;
  }

 private:
  struct Held {
    Int64 end;
    int slot;
  };
  const Schedule& s;
  int rank;
  const RankSchedule& layout;
  std::vector<int> holds;       // piece in each slot
  std::map<Int64, Held> valid;  // by first row
};

// One rank's steps, replayed.
class Replay {
 public:
  Replay(const Schedule& s, int rank) : s(s), rank(rank), node(s.node_of(rank)), memory(s, rank) {}

  void run() {
    const std::vector<Step>& steps = s.of[index(rank)].steps;
    for (std::size_t t = 0; t < steps.size(); ++t) {
      const int step = static_cast<int>(t);
      std::vector<Range> used, written;
      for (const Work& w : steps[t].work) work(w, step), used.push_back(memory.rows(w.slot, w.key));
      for (const Transfer& x : steps[t].group) {
        if (x.what == What::keys) {
          if (x.send) memory.require(x.slot, x.piece, step, "sends");
          (x.send ? used : written).push_back(memory.rows(x.slot, x.piece));
        } else {
          other(x, step, t + 1 == steps.size());
        }
      }
      apart(used, written, step);
      for (const Work& w : steps[t].work) last_work[w.key] = step;
      for (const Transfer& x : steps[t].group)
        if (x.what == What::keys && !x.send) memory.put(x.slot, x.piece);
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
    memory.require(w.slot, w.key, step, "works on");
    if (s.pieces[index(w.query)].node != node)
      fault("rank ", rank, ", step ", step, ": works on queries of piece ", w.query, ", which node ",
            s.pieces[index(w.query)].node, " holds");
    if (!sees(s, s.pieces[index(w.query)], s.pieces[index(w.key)]))
      fault("rank ", rank, ", step ", step, ": piece ", w.query, " sees nothing of piece ", w.key);
    if (s.partition.slices > 1 && step == 0) fault("rank ", rank, ": works before heads were exchanged");
    std::vector<int>& seen = keys[w.query];
    if (s.settings.scheme == Scheme::gather && !seen.empty() && rows(seen.back()).begin > rows(w.key).begin)
      fault("rank ", rank, ", step ", step, ": piece ", w.query, " sees piece ", w.key, " after ", seen.back(),
            ", against the order of keys");
    seen.push_back(w.key);
    queries[w.key].push_back(w.query);
  }

  void other(const Transfer& x, int step, bool is_last) {
    if (x.what == What::gradients) {
      if (s.settings.pass == Pass::forward) fault("rank ", rank, ", step ", step, ": gradients in a forward pass");
      if (!x.send) return;
      const auto done = last_work.find(x.piece);
      if (done == last_work.end() || s.rank_of(s.pieces[index(x.piece)].node, s.slice_of(rank)) != x.peer)
        fault("rank ", rank, ", step ", step, ": returns gradients of piece ", x.piece, " to rank ", x.peer,
              done == last_work.end() ? " before any work on it" : ", which does not hold it");
      sent[x.piece].push_back({{x.first, x.last}, step});
      return;
    }
    if (s.node_of(x.peer) != node || x.peer == rank || (x.what == What::heads ? step != 0 : !is_last))
      fault("rank ", rank, ", step ", step, ": exchanges ", name(x.what), " with rank ", x.peer, " out of place");
    ++exchanges[{x.what, x.send, x.peer}];
  }

  // What a step writes must be nothing that it reads, nor be written twice.
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
      std::vector<Span> seen;
      for (const int key : keys[query]) seen.push_back(rows(key));
      std::sort(seen.begin(), seen.end(), by_position);
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

  // Every query piece's share of dK and dV leaves once, after the last work on the keys.
  void returned() const {
    if (s.settings.pass == Pass::forward) return;
    for (const auto& [key, step] : last_work) {
      const auto found = sent.find(key);
      if (s.pieces[index(key)].node == node) {
        if (found != sent.end()) fault("rank ", rank, ": sends gradients of its own piece ", key);
        continue;
      }
      if (found == sent.end()) fault("rank ", rank, ": never returns the gradients of piece ", key);
      for (const auto& [leaves, when] : found->second)
        if (when <= step)
          fault("rank ", rank, ", step ", when, ": returns gradients of piece ", key, " before its last work");
      for (const int query : queries.at(key)) {
        const Int64 leaf = s.pieces[index(query)].leaf;
        Int64 times = 0;
        for (const auto& [leaves, when] : found->second)
          times += leaves == Leaves{0, 0} || (leaves.first <= leaf && leaf < leaves.last);
        if (times != 1)
          fault("rank ", rank, ": returns gradients of piece ", key, " for piece ", query, " ", times, " times");
      }
    }
  }

 public:
  Int64 tile = 1;

 private:
  const Schedule& s;
  int rank, node;
  KeyMemory memory;
  std::map<int, std::vector<int>> keys;     // by query piece, the key pieces in the order of work
  std::map<int, std::vector<int>> queries;  // by key piece
  std::map<int, int> last_work;             // by key piece, the step
  std::map<int, std::vector<std::pair<Leaves, int>>> sent;
  std::map<std::tuple<What, bool, int>, int> exchanges;
};

// Sends of each step against receives, between every two ranks, in order.
void check_matches(const Schedule& s) {
  const std::size_t steps = s.of.empty() ? 0 : s.of[0].steps.size();
  using Message = std::tuple<What, int, Int64, Int64>;
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
        (x.send ? link.first : link.second).push_back({x.what, x.piece, x.first, x.last});
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
