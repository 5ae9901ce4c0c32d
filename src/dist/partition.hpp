// SPDX-License-Identifier: Apache-2.0
// Which rows of a problem each rank holds: spans of its sequences, made by pure functions of the lengths, the mask and
// the number of ranks. Included by the schedule and by everything that runs it. Implements docs/scale_out.md,
// "Partitions".
#pragma once

#include <string>
#include <vector>

#include "math/mask.hpp"

namespace tessera::dist {

// Which keys a query sees, by position: that of tessera::Options, with as many keys as queries in every sequence.
struct Mask {
  bool causal = false;
  Int64 left = -1, right = -1;  // window, inclusive; -1: no bound
  Int64 offset = 0;             // of the diagonal

  BandMask band(Int64 length) const;
};

// Rows begin to end of one sequence.
struct Span {
  Int64 sequence = 0, begin = 0, end = 0;

  Int64 rows() const { return end - begin; }
  bool operator==(const Span&) const = default;
};

// The pairs of a query in rows begin to end and a key that it sees.
double visible_pairs(const BandMask& band, Int64 begin, Int64 end);

// By rank, the spans of its rows in the order in which it stores them. Ranks come in nodes of `slices`: before the
// attention, the ranks of a node exchange heads for rows, and each then works on all rows of the node for its share of
// the heads. With one slice a node is a rank.
struct Partition {
  std::vector<std::vector<Span>> of;
  int slices = 1;

  int ranks() const { return static_cast<int>(of.size()); }
  int nodes() const { return ranks() / slices; }
  Int64 rows(int rank) const;
};

// Cuts lie on multiples of `align` rows of a sequence, or at its end.

// All rows in order, in equal parts.
Partition contiguous(const std::vector<Int64>& lengths, int ranks, Int64 align);
// Every sequence in two chunks for each rank: rank r holds the r-th from the front and the r-th from the back, which
// together see as many keys under a causal mask as any other two.
Partition zigzag(const std::vector<Int64>& lengths, int ranks, Int64 align);
// Equal work under this mask for many sequences: one that is more than a rank's share is cut as by zigzag, others stay
// whole where they fit, and what is left is dealt in blocks of `align` rows, most work first, to the rank with least.
// No rank has more than the mean and one such block.
Partition balanced(const std::vector<Int64>& lengths, const Mask& mask, int ranks, Int64 align);
// Every span of a node in `slices` parts, one for each of its ranks.
Partition two_level(const Partition& nodes, int slices, Int64 align);

// Whether a span is a place in a sequence, or at its end, and holds no row. Layouts that cut every sequence in the same
// way have such spans; a Partition has none of them, and its ranks hold the same rows without.
bool is_empty(const Span& span, const std::vector<Int64>& lengths);

// Why a partition is none of these sequences: spans beyond them, rows that nobody holds or two ranks do. Empty: it is.
std::string fault_of(const Partition& partition, const std::vector<Int64>& lengths);

// The rows of a node: those of its ranks, by sequence and position, neighbours joined.
std::vector<Span> node_rows(const Partition& partition, int node);

}  // namespace tessera::dist
