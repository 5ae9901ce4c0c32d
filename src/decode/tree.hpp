// SPDX-License-Identifier: Apache-2.0
// The merge tree of the `decode` kernels: the keys of a sequence in leaves of 256 at absolute positions, two nodes of a
// level under one of the next, and what becomes of two states when they are merged. The tree is fixed, whoever computes
// which of its nodes: so a row's bits do not depend on how the work was divided. Shared by host and device code; the
// stack of a block, siblings of several blocks, sinks and tests merge by this text.
// Implements docs/algorithm.md, "Merge"; docs/gpu_kernels.md, "decode", has a picture.
#pragma once

#include "math/mask.hpp"

namespace tessera::decode {

inline constexpr int leaf_keys = 256;
// Siblings whose states one block merges at once: a subtree of four levels.
inline constexpr int family_levels = 4, family = 1 << family_levels;

// One row over some keys: the largest score in units of log2(e), and the sum of exponentials relative to it. O, which
// is not divided by l, lies elsewhere. l = 0: no key is seen; every other sum is 1 or more, or NaN.
struct RowState {
  float m, l;
  constexpr bool empty() const { return l == 0; }
};

// What the two O of a merge are multiplied by. Absent: that side saw no key, and the other one stays as it is, to the
// bit.
struct Weights {
  float a, b;
};
inline constexpr float absent = -1;

struct Merged {
  RowState state;
  Weights weights;
};

// The keys of a come before those of b. Math brings exp2 and a fused multiply_add: no compiler has a choice of
// rounding.
template <class Math>
constexpr Merged merge(RowState a, RowState b) {
  if (b.empty()) return {a, {1, absent}};
  if (a.empty()) return {b, {absent, 1}};
  const float m = a.m > b.m ? a.m : b.m;
  const Weights w{Math::exp2(a.m - m), Math::exp2(b.m - m)};
  return {{m, Math::multiply_add(a.l, w.a, b.l * w.b)}, w};
}

// An element of O.
template <class Math>
constexpr float merged(Weights w, float a, float b) {
  const float both = Math::multiply_add(a, w.a, b * w.b);  // a select, no branch
  return w.b == absent ? a : w.a == absent ? b : both;
}

// --- nodes

// Neighbours of one level: leaves, or what lies above them.
struct Nodes {
  Int32 first, end;
  constexpr Int32 count() const { return end - first; }
  // Those `levels` higher that they lie under.
  constexpr Nodes above(int levels) const { return {first >> levels, ((end - 1) >> levels) + 1}; }
  constexpr bool operator==(const Nodes&) const = default;
};

// The leaves that hold some of the keys: one without keys, if there are none.
constexpr Nodes leaves_of(Range keys) {
  return keys.empty() ? Nodes{0, 1} : Nodes{Int32(keys.begin / leaf_keys), Int32(ceil_div(keys.end, leaf_keys))};
}

// Of these leaves, those under node `node` of a level.
constexpr Nodes leaves_under(Nodes leaves, Int32 node, int level) {
  return {Int32(greater(leaves.first, Int64(node) << level)), Int32(lesser(leaves.end, Int64(node + 1) << level))};
}

// Levels above the leaves, so that one node is above so many leaves.
constexpr int levels_above(Int64 leaves) {
  int levels = 0;
  while ((Int64(1) << levels) < leaves) ++levels;
  return levels;
}

}  // namespace tessera::decode
