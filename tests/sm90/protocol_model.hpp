// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory, places that they guard, and roles that wait for them, as state machines that go on in
// random order. Included by tests/sm90/sm90_protocol_test.cpp and tests/sm90/sm90_backward_protocol_test.cpp.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <functional>
#include <random>
#include <utility>
#include <vector>

namespace tessera::test {

// mbarrier: phases end when all arrivals and all announced bytes (here: one announced copy) are in.
struct ModelBarrier {
  int count = 0, arrived = 0, copies = 0, phase = 0;
  bool done(int parity) const { return phase % 2 != parity; }  // the phase of this parity has ended
  void arrive() { ++arrived, settle(); }
  void expect() { ++copies, arrive(); }
  void complete() { --copies, settle(); }
  void settle() {
    ASSERT_LE(arrived, count);
    if (arrived == count && copies == 0) arrived = 0, ++phase;
  }
};

struct Slot {
  ModelBarrier full, empty;
  int holds = -1;  // which tile of which work
  int readers = 0;
};

// The place of the `use`th use of a ring.
struct Ring {
  std::vector<Slot>& slots;
  int use = 0, per_stage = 1;
  Slot& slot(int one = 0) const { return slots[std::size_t(use % stages() * per_stage + one)]; }
  int round() const { return use / stages(); }
  int stages() const { return int(slots.size()) / per_stage; }
};

// One role's program: a list of operations, each of which may have to wait. Returns false while it waits.
using Operation = std::function<bool()>;
using Program = std::vector<Operation>;

// What happens between roles: copies on their way.
class ProtocolModel {
 public:
  // Waits for a slot to be empty, for the `use`th time, and fills it, by a copy or at once.
  Operation fill(Slot& slot, int use, int what, bool copy = true) {
    return [this, &slot, use, what, copy] {
      if (!slot.empty.done((use + 1) % 2)) return false;
      EXPECT_EQ(slot.readers, 0) << "overwritten while it is read";
      if (copy)
        slot.full.expect(), in_flight.push_back({&slot, what});
      else
        slot.holds = what, slot.full.arrive();
      return true;
    };
  }
  static Operation take(Slot& slot, int use, int what) {
    return [&slot, use, what] {
      if (!slot.full.done(use % 2)) return false;
      EXPECT_EQ(slot.holds, what);
      ++slot.readers;
      return true;
    };
  }
  static Operation give(Slot& slot) {
    return [&slot] { return --slot.readers, slot.empty.arrive(), true; };
  }

  // Any role, or any copy, goes on at any time. True: all of them come to their end.
  bool run(const std::vector<Program>& roles, std::mt19937& random) {
    std::vector<std::size_t> next(roles.size(), 0);
    for (int idle = 0; idle < 500;) {
      const std::size_t role = random() % (roles.size() + 1);
      bool moved = false;
      if (role == roles.size()) {
        if (!in_flight.empty()) {
          const std::size_t n = random() % in_flight.size();
          const auto [slot, what] = in_flight[n];
          in_flight.erase(in_flight.begin() + std::ptrdiff_t(n));
          slot->holds = what, slot->full.complete(), moved = true;
        }
      } else if (next[role] < roles[role].size()) {
        moved = roles[role][next[role]]();
        next[role] += moved;
      }
      idle = moved ? 0 : idle + 1;
    }
    for (std::size_t role = 0; role < roles.size(); ++role)
      if (next[role] < roles[role].size()) return false;
    return in_flight.empty();
  }

 private:
  std::vector<std::pair<Slot*, int>> in_flight;
};

}  // namespace tessera::test
