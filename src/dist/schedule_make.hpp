// SPDX-License-Identifier: Apache-2.0
// A schedule in the making: what the makers of both schemes share. Included by schedule*.cpp alone. Implements
// docs/scale_out.md, "Schedules".
#pragma once

#include "dist/schedule.hpp"

namespace tessera::dist {

struct Draft {
  Schedule s;
  std::vector<Int64> chunk;            // by piece, the place of its span in its sequence
  std::vector<std::size_t> begins;     // by sequence, where its pieces begin in the list; one more entry at the end
  std::vector<std::vector<int>> held;  // by node, its pieces

  int nodes() const { return s.partition.nodes(); }
  const Piece& piece(int p) const { return s.pieces[static_cast<std::size_t>(p)]; }

  // The same on every slice. at_from, at_to: where the rows begin in the memory for keys of either node.
  void transfer(int step, int from, int to, Transfer t, Int64 at_from, Int64 at_to);
  void work(int step, int node, const Work& w);

  // fn(piece) for every piece of a sequence that holds some of these rows.
  template <class Fn>
  void for_pieces(Int64 sequence, Range rows, Fn fn) const {
    if (rows.empty()) return;
    const auto end = static_cast<int>(begins[static_cast<std::size_t>(sequence) + 1]);
    for (int p = piece_at(s, sequence, rows.begin); p < end && piece(p).rows.begin < rows.end; ++p) fn(p);
  }

 private:
  Step& step(int rank, int number);
};

inline Range common(Range a, Range b) { return {greater(a.begin, b.begin), lesser(a.end, b.end)}; }

void make_ring(Draft& draft);
void make_gather(Draft& draft);

}  // namespace tessera::dist
