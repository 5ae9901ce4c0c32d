// SPDX-License-Identifier: Apache-2.0
// See tests/emulated/clocks.hpp.
#include "tests/emulated/clocks.hpp"

#include <algorithm>

namespace tessera::emulated {

namespace {

bool within(const Past& a, const Past& b) {
  for (std::size_t n = 0; n < a.size(); ++n)
    if (a[n] > (n < b.size() ? b[n] : 0)) return false;
  return true;
}

// Of `b`, everything is in `a`.
bool within(const Pasts& b, const Pasts& a) {
  return std::all_of(b->begin(), b->end(), [&](const auto& of) {
    const auto in_a = a->find(of.first);
    return in_a != a->end() && (in_a->second == of.second || within(*of.second, *in_a->second));
  });
}

// What holds everything already is taken as it is, so that those who know the same share it.
Pasts join_anew(const Pasts& a, const Pasts& b) {
  if (within(a, b)) return b;
  if (within(b, a)) return a;
  auto all = std::make_shared<std::map<UInt32, std::shared_ptr<const Past>>>(*a);
  for (const auto& [block, past] : *b) {
    std::shared_ptr<const Past>& known = (*all)[block];
    if (!known) {
      known = past;
    } else if (known != past) {
      auto both = std::make_shared<Past>(*known);
      join(*both, *past);
      known = both;
    }
  }
  return all;
}

}  // namespace

void join(Past& to, const Past& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (std::size_t n = 0; n < from.size(); ++n) to[n] = std::max(to[n], from[n]);
}

void raise(Past& to, UInt32 who, UInt32 time) {
  if (who >= to.size()) to.resize(who + 1);
  to[who] = std::max(to[who], time);
}

// At a barrier hundreds of threads join the same two.
Pasts joined(const Pasts& a, const Pasts& b) {
  if (!b || a == b) return a;
  if (!a) return b;
  static struct { Pasts a, b, both; } recent[4];
  static unsigned next = 0;
  for (const auto& one : recent)
    if (one.a == a && one.b == b) return one.both;
  auto& one = recent[next++ % 4];
  one = {a, b, join_anew(a, b)};
  return one.both;
}

bool holds(const Past& past, UInt32 who, UInt32 time) { return who < past.size() && past[who] >= time; }
bool holds(const Pasts& pasts, UInt32 block, UInt32 who, UInt32 time) {
  if (!pasts) return false;
  const auto past = pasts->find(block);
  return past != pasts->end() && holds(*past->second, who, time);
}

void join(Clock& to, const Clock& from) {
  join(to.known, from.known), join(to.published, from.published);
  to.others = joined(to.others, from.others), to.fences = joined(to.fences, from.fences);
  to.published_global = joined(to.published_global, from.published_global);
  to.complete = std::max(to.complete, from.complete);
}

void Knower::learn(const Pasts& from, UInt32 own_block) {
  if (!from) return;
  others = joined(others, from);
  if (const auto own = from->find(own_block); own != from->end()) join(known, *own->second);
}

Pasts Knower::all(UInt32 own_block) const {
  auto out = others ? std::make_shared<std::map<UInt32, std::shared_ptr<const Past>>>(*others)
                    : std::make_shared<std::map<UInt32, std::shared_ptr<const Past>>>();
  (*out)[own_block] = std::make_shared<const Past>(known);
  return out;
}

}  // namespace tessera::emulated
