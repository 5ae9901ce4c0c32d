// SPDX-License-Identifier: Apache-2.0
// The order in which the one-pass backward kernel takes its works, blocks of keys of all heads. Included by src/sm90:
// plans choose an order, device code looks a work up in it. Implements docs/gpu_kernels.md, "The backward pass in one
// pass".
#pragma once

#include "math/types.hpp"

namespace tessera::sm90 {

// Heads are those of K and V of all sequences, and each has as many blocks. Works are taken in steps. `together` heads
// form a group: it begins `stagger` steps after the group before it, and from then on each of its heads has its next
// block taken in every step. With a stagger of `blocks`, groups follow each other; with a smaller one they overlap, in
// different phases. The blocks of a head are always taken in the order of their keys, so whoever waits for his turn at
// a tile of dQ waits for a work that was taken before.
struct WorkOrder {
  Int32 heads, blocks;
  Int32 together, stagger;
};

struct WorkPlace {
  Int64 head, block;
};

// How many works are taken before a step.
constexpr Int64 works_before(const WorkOrder& order, Int64 step) {
  const Int64 groups = order.heads / order.together, rest = order.heads % order.together;  // the last group is smaller
  // Of one head of each group, as if heads had no end.
  const auto endless = [&](Int64 steps) -> Int64 {
    if (steps <= 0) return 0;
    const Int64 begun = lesser(groups, (steps - 1) / order.stagger + 1);
    return begun * steps - order.stagger * (begun * (begun - 1) / 2);
  };
  const Int64 of_the_last = clamp(step - groups * order.stagger, 0, order.blocks);
  return order.together * (endless(step) - endless(step - order.blocks)) + rest * of_the_last;
}

// The work that is taken as number n. Groups that follow each other need no search, and 32 bits hold what is counted.
constexpr WorkPlace work_at(const WorkOrder& order, Int64 n) {
  if (order.stagger == order.blocks) {
    const Int32 number = Int32(n), group = number / (order.together * order.blocks);
    const Int32 first = group * order.together, left = order.heads - first;
    const Int32 width = left < order.together ? left : order.together, at = number - first * order.blocks;
    return {first + at % width, at / width};
  }
  Int64 step = 0, end = (ceil_div(order.heads, order.together) - 1) * order.stagger + order.blocks;  // of all steps
  while (end - step > 1) {
    const Int64 middle = step + (end - step) / 2;
    (works_before(order, middle) <= n ? step : end) = middle;
  }
  const Int64 first = step < order.blocks ? 0 : (step - order.blocks) / order.stagger + 1;  // group that is not done
  const Int64 at = n - works_before(order, step), group = first + at / order.together;
  return {group * order.together + at % order.together, step - group * order.stagger};
}

}  // namespace tessera::sm90
