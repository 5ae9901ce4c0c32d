// SPDX-License-Identifier: Apache-2.0
// How much of everybody's past somebody knows (vector clocks), by the rules of the PTX memory model: within a block by
// barriers, and between blocks by fences and strong accesses. Included by tests/emulated/races.hpp. docs/testing.md,
// "Races".
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "math/types.hpp"

namespace tessera::emulated {

// Who accesses memory for a thread, besides the thread itself. Each has a time of its own, which others know only after
// they have waited for it. A bulk store has read its source before it has written, so it is two of them.
enum class Agent : unsigned char { none, copies, products, bulk_copies, bulk_stores, bulk_writes };

// How much of a block's past is known, by the number of the one who acted.
using Past = std::vector<UInt32>;
// The same of many blocks, by their numbers. Never changed once it is made, so that many share it.
using Pasts = std::shared_ptr<const std::map<UInt32, std::shared_ptr<const Past>>>;

void join(Past& to, const Past& from);
void raise(Past& to, UInt32 who, UInt32 time);
Pasts joined(const Pasts& a, const Pasts& b);
bool holds(const Past& past, UInt32 who, UInt32 time);
bool holds(const Pasts& pasts, UInt32 block, UInt32 who, UInt32 time);

// What threads of a block tell each other when they meet.
struct Clock {
  Past known, published;   // of their own block: to ordinary accesses, and, behind proxy fences, to asynchronous ones
  Pasts others;            // what is known of other blocks
  Pasts published_global;  // what asynchronous accesses to global memory see, behind proxy fences of this block
  // At fences.sc of anybody from which barriers and strong accesses led here. Those fences have a place before the next
  // one here in the order of all fences.sc, so that this one sees what was done before them.
  Pasts fences;
  UInt32 complete = 0;  // blocks before this one have ended, and what they wrote is visible
};

void join(Clock& to, const Clock& from);

// A thread.
struct Knower : Clock {
  Pasts fenced;    // what it knew at its latest fence: its strong writes tell of it (release pattern)
  Pasts observed;  // what its strong reads have been told: it knows it behind its next fence (acquire pattern)

  void learn(const Pasts& from, UInt32 own_block);
  Pasts all(UInt32 own_block) const;  // that it knows
};

// A place in global memory with strong accesses: what its present value tells. A value that an atomic operation made of
// another one tells of both.
struct Place {
  Pasts released, fences;
};

}  // namespace tessera::emulated
