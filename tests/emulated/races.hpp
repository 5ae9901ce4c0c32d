// SPDX-License-Identifier: Apache-2.0
// Looks for races of a kernel on the emulated machine: two accesses to the same bytes of shared memory, one of them a
// write, that nothing orders. What orders is what the PTX memory model says: barriers, phases of an mbarrier, a warp's
// __syncwarp, waits for asynchronous copies, products and stores, and the fence between ordinary accesses and those of
// the asynchronous proxy. An order that held by chance in this run does not count, so one run speaks for all schedules.
// Included by tests/emulated/machine.hpp, which calls it if TESSERA_RACES is defined. docs/testing.md, "Races".
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "math/types.hpp"

namespace tessera::emulated {

#ifdef TESSERA_RACES
inline constexpr bool looks_for_races = true;
#else
inline constexpr bool looks_for_races = false;
#endif

// For functions that access the block's memory by Machine::load and store, or not at all, so that the compiler need not
// tell of it (tests/emulated/races.cpp).
#define TESSERA_UNWATCHED [[gnu::no_sanitize("thread")]]

// The block's memory, whose accesses are looked at.
inline const unsigned char *watched_begin = nullptr, *watched_end = nullptr;

// How much of everybody's past is known, by the number of the one who acted (a vector clock): to ordinary accesses,
// and, by way of fences, to those of the asynchronous proxy.
struct Clock {
  std::vector<UInt32> known, published;
};

// Who accesses memory for a thread, besides the thread itself. Each has a time of its own, which others know only after
// they have waited for it.
enum class Agent { copies, products, bulk_copies, bulk_stores };

// `same`: a write of what is there already. Several may write the same at once, and a reader needs to have waited for
// one of them only. `atomic`: reads and writes, in no order with others of its kind.
enum class Access { read, write, same, atomic };

class Races {
 public:
  void begin_block(const unsigned char* memory, std::size_t bytes, int threads);
  void end_block() { running = false; }

  // What a thread has done and knows, for those who wait for it; and what it learns by waiting.
  void release(std::size_t thread, Clock& to);
  void acquire(std::size_t thread, const Clock& from);
  // fence.proxy.async: all that the thread knows.
  void publish(std::size_t thread);

  // An agent's work number `time` (from 1) is known to a thread, or to those who wait at `to`.
  void learn(std::size_t thread, Agent agent, const void* key, UInt32 time);
  void announce(std::size_t thread, Agent agent, const void* key, UInt32 time, Clock& to);

  // By the thread itself, or by an agent of its own, which begins with what the thread knows.
  void access(std::size_t thread, const void* at, std::size_t bytes, Access access, const void* code);
  void access_by(Agent agent, const void* key, UInt32 time, std::size_t thread, const void* at, std::size_t bytes,
                 Access access);

  std::string found;  // the first race, in words

 private:
  struct Event {
    UInt32 who = 0, time = 0;  // time 0: nothing yet
    const void* code = nullptr;
  };
  // Several events of a cell are a list in `lists`, whose number (from 1) stands beside the only one there mostly is.
  struct Cell {
    Event write, read;
    bool write_is_async = false;
    Access kind = Access::write;  // of the writes
    UInt32 writers = 0, readers = 0;
  };
  static constexpr std::size_t cell_bytes = 2;

  static bool knows(const std::vector<UInt32>& clock, const Event& e);
  UInt32 number_of(Agent agent, const void* key);
  void visit(std::size_t thread, const Event& now, bool async, const void* at, std::size_t bytes, Access access);
  void add(const Event& only, UInt32& list, const Event& now);
  std::string name(const Event& e) const;
  void report(std::size_t cell, const Event& now, bool writes, const Event& before, bool wrote, bool only_fence);

  bool running = false;
  std::vector<Clock> clocks;  // by thread
  std::map<std::pair<Agent, const void*>, UInt32> agents;
  std::vector<Cell> cells;
  std::vector<std::vector<Event>> lists;
};

}  // namespace tessera::emulated
