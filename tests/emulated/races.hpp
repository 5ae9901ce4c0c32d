// SPDX-License-Identifier: Apache-2.0
// Looks for races of kernels on the emulated machine: two accesses to the same bytes, one of them a write, that nothing
// orders; in a block's shared memory, and in global memory between all blocks of all launches. What orders is what the
// PTX memory model says; tests/emulated/clocks.hpp has the order, this file has the memory. An order that held by
// chance in this run does not count. Included by tests/emulated/block.hpp, whose machine calls it if TESSERA_RACES is
// defined. docs/testing.md, "Races".
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/emulated/clocks.hpp"

namespace tessera::emulated {

#ifdef TESSERA_RACES
inline constexpr bool looks_for_races = true;
#else
inline constexpr bool looks_for_races = false;
#endif

// For functions that access the block's memory by Machine::load and store, or not at all, so that the compiler need not
// tell of it (tests/emulated/races.cpp).
#define TESSERA_UNWATCHED [[gnu::no_sanitize("thread")]]

// `same`: a write of what is there already. Several may write the same at once, and a reader needs to have waited for
// one of them only. `atomic`: reads and writes, in no order with others of its kind; `strong_read`: sees what they
// write. All others are weak.
enum class Access { read, write, same, atomic, strong_read };

// What has happened to some memory, in cells of a few bytes.
class Shadow {
 public:
  struct Event {
    UInt32 who = 0, time = 0;  // time 0: nothing yet
    UInt32 block = 0;
    bool async = false, strong = false;
    Agent agent = Agent::none;  // a thread itself
    const void* code = nullptr;
  };
  // Several events of a cell are a list in `lists`, whose number (from 1) stands beside the only one there mostly is.
  struct Cell {
    Event write, read;
    UInt32 writers = 0, readers = 0, atomics = 0;  // the last are always a list
    bool same = false;                             // the writes
  };

  Shadow() = default;
  Shadow(const void* begin, std::size_t bytes, std::size_t cell_bytes, std::string name);

  Cell& cell(std::size_t number);
  void clear();
  std::vector<Event>& list_of(const Event& only, UInt32& number);
  void drop(UInt32& list);
  std::vector<Event>& list(UInt32 number) { return lists[number - 1]; }

  const unsigned char *begin = nullptr, *end = nullptr;
  std::size_t cell_bytes = 2;
  std::string name = "shared memory";

 private:
  static constexpr std::size_t page_cells = 256;
  std::vector<std::unique_ptr<Cell[]>> pages;
  std::vector<std::size_t> used;  // pages
  std::vector<std::vector<Event>> lists;
  std::vector<UInt32> unused;  // lists
};

// A block that is under way: who acts in it, what they know, and its shared memory.
struct BlockClocks {
  UInt32 number = 0;            // among the blocks of all launches
  std::vector<Knower> threads;  // by thread
  std::map<std::pair<Agent, const void*>, UInt32> agents;
  Shadow shared;
  bool waited = false;  // for the launch before this one
};

class Races {
 public:
  // A launch of so many blocks. All of those before it have ended, and what they wrote is visible; `programmatic`: of
  // the one before it only for those who have waited for it.
  void begin_launch(int blocks, bool programmatic);
  void begin_block(BlockClocks& block, int index, const unsigned char* memory, std::size_t bytes, int threads);
  void enter(BlockClocks& block) { now = &block; }
  void end_block();
  void wait_for_launch_before(std::size_t thread);

  // Global memory that is looked at.
  void watch(const void* at, std::size_t bytes, std::size_t cell_bytes, const std::string& name);
  void forget();
  // Numbers by which blocks only take turns: who got which is chance, and orders nothing.
  void tickets(const void* at) { ticket_places.push_back(at); }
  bool watches(const void* at) const;

  // What a thread has done and knows, for those of its block who wait for it; and what it learns by waiting.
  void release(std::size_t thread, Clock& to);
  void acquire(std::size_t thread, const Clock& from);
  // fence.proxy.async: all that the thread knows, of shared memory or of global memory.
  void publish(std::size_t thread);
  void publish_global(std::size_t thread);

  // An agent's work number `time` (from 1) is known to a thread, or to those who wait at `to`.
  void learn(std::size_t thread, Agent agent, const void* key, UInt32 time);
  void announce(std::size_t thread, Agent agent, const void* key, UInt32 time, Clock& to);

  // fence.sc.gpu or fence.acq_rel.gpu, and a strong access at the scope of the GPU: what it reads and writes is a place
  // by which blocks may order other memory.
  void fence(std::size_t thread, bool sc);
  enum class Strong { look, acquire, change, add };  // ld.relaxed, ld.acquire, atom, red
  void strong(std::size_t thread, const void* at, Strong how);

  // By the thread itself, or by an agent of its own, which begins with what the thread knows. Memory that is not
  // watched is passed over.
  void access(std::size_t thread, const void* at, std::size_t bytes, Access access, const void* code);
  void access_by(Agent agent, const void* key, UInt32 time, std::size_t thread, const void* at, std::size_t bytes,
                 Access access);

  std::string found;  // the first race, in words

 private:
  using Event = Shadow::Event;

  Knower& knower(std::size_t thread) { return now->threads[thread]; }
  Shadow* shadow_of(const void* at);
  UInt32 number_of(Agent agent, const void* key);
  bool knows(const Knower& k, const Event& e) const;
  bool sees(const Knower& k, const Event& write, bool async, bool global) const;
  void visit(const Knower& k, Event by, const void* at, std::size_t bytes, Access access);
  void add_after(const Knower& k, std::vector<Event>& to, const Event& by) const;
  void report(const Shadow& in, std::size_t cell, const Event& by, bool writes, const Event& before, bool wrote,
              bool only_fence);
  std::string name(const Event& e, bool with_block) const;

  BlockClocks* now = nullptr;
  UInt32 first_block = 0, next_block = 0;  // of this launch, and of the next one
  UInt32 known_at_start = 0;               // blocks before this one have ended when a block of this launch begins
  bool programmatic = false;
  std::vector<Shadow> regions;  // by address
  std::vector<const void*> ticket_places;
  std::map<const void*, Place> places;
};

}  // namespace tessera::emulated
