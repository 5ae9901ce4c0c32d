// SPDX-License-Identifier: Apache-2.0
// The search for races, and what the compiler calls for every access to memory (-fsanitize=thread), without a sanitizer
// behind it: accesses to a block's shared memory go to the emulated machine. Linked into the tests of device code if
// TESSERA_RACES is on; see tests/emulated/races.hpp.
#include "tests/emulated/races.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>

#include "tests/emulated/machine.hpp"

namespace tessera::emulated {

namespace {

void join(std::vector<UInt32>& to, const std::vector<UInt32>& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (std::size_t n = 0; n < from.size(); ++n) to[n] = std::max(to[n], from[n]);
}
void join(Clock& to, const Clock& from) { join(to.known, from.known), join(to.published, from.published); }

void raise(std::vector<UInt32>& clock, UInt32 who, UInt32 time) {
  if (who >= clock.size()) clock.resize(who + 1);
  clock[who] = std::max(clock[who], time);
}

// Where in the program's text, for addr2line.
std::string place_of(const void* code) {
  Dl_info place;
  if (code == nullptr || dladdr(code, &place) == 0) return "";
  char text[64];
  const auto offset = static_cast<const char*>(code) - static_cast<const char*>(place.dli_fbase);
  std::snprintf(text, sizeof(text), " (+0x%llx)", static_cast<unsigned long long>(offset));
  return text;
}

}  // namespace

void Races::begin_block(const unsigned char* memory, std::size_t bytes, int threads) {
  watched_begin = memory, watched_end = memory + bytes, agents.clear(), clocks.assign(std::size_t(threads), {});
  for (UInt32 n = 0; n < UInt32(threads); ++n) raise(clocks[n].known, n, 1);
  cells.assign(bytes / cell_bytes + 1, {}), lists.clear(), running = memory != nullptr;
}

// What a thread does after it has told others is none of what they know.
void Races::release(std::size_t thread, Clock& to) { join(to, clocks[thread]), ++clocks[thread].known[thread]; }
void Races::acquire(std::size_t thread, const Clock& from) { join(clocks[thread], from); }
void Races::publish(std::size_t thread) {
  clocks[thread].published = clocks[thread].known, ++clocks[thread].known[thread];
}

void Races::learn(std::size_t thread, Agent agent, const void* key, UInt32 time) {
  raise(clocks[thread].known, number_of(agent, key), time);
}
void Races::announce(std::size_t thread, Agent agent, const void* key, UInt32 time, Clock& to) {
  join(to, clocks[thread]), raise(to.known, number_of(agent, key), time);
}

void Races::access(std::size_t thread, const void* at, std::size_t bytes, Access access, const void* code) {
  if (running) visit(thread, {UInt32(thread), clocks[thread].known[thread], code}, false, at, bytes, access);
}
void Races::access_by(Agent agent, const void* key, UInt32 time, std::size_t thread, const void* at, std::size_t bytes,
                      Access access) {
  if (running) visit(thread, {number_of(agent, key), time}, agent != Agent::copies, at, bytes, access);
}

bool Races::knows(const std::vector<UInt32>& clock, const Event& e) {
  return e.time == 0 || (e.who < clock.size() && clock[e.who] >= e.time);
}

UInt32 Races::number_of(Agent agent, const void* key) {
  return agents.try_emplace({agent, key}, UInt32(clocks.size() + agents.size())).first->second;
}

void Races::visit(std::size_t thread, const Event& now, bool async, const void* at, std::size_t bytes, Access access) {
  const Clock& clock = clocks[thread];
  const bool writes = access != Access::read;
  const auto offset = std::size_t(static_cast<const unsigned char*>(at) - watched_begin);
  for (std::size_t n = offset / cell_bytes; n <= (offset + bytes - 1) / cell_bytes; ++n) {
    Cell& cell = cells[n];
    // What an ordinary instruction wrote, the asynchronous proxy sees behind a fence only.
    const auto& known = async && !cell.write_is_async ? clock.published : clock.known;
    const auto sees = [&](const Event& write) { return knows(known, write); };
    const bool joins_writers = access == Access::same ? !cell.write_is_async && !sees(cell.write)
                                                      : access == Access::atomic && cell.kind == access;
    bool ordered = joins_writers || sees(cell.write);
    if (!joins_writers && cell.writers > 0) {
      const std::vector<Event>& written = lists[cell.writers - 1];
      const bool needs_one = !writes && cell.kind == Access::same;
      ordered = needs_one ? std::any_of(written.begin(), written.end(), sees)
                          : std::all_of(written.begin(), written.end(), sees);
    }
    if (!ordered) return report(n, now, writes, cell.write, true, knows(clock.known, cell.write));
    if (!writes) {
      if (cell.readers == 0 && knows(clock.known, cell.read))
        cell.read = now;
      else if (cell.readers > 0 || cell.read.who != now.who || cell.read.time != now.time)
        add(cell.read, cell.readers, now);
      continue;
    }
    const Event* read = cell.readers ? lists[cell.readers - 1].data() : &cell.read;
    const Event* end = read + (cell.readers ? lists[cell.readers - 1].size() : 1);
    for (; access != Access::same && read < end; ++read)
      if (!knows(clock.known, *read)) return report(n, now, writes, *read, false, false);
    if (joins_writers)
      add(cell.write, cell.writers, now), cell.kind = access;
    else
      cell = {.write = now, .write_is_async = async, .kind = access};
  }
}

void Races::add(const Event& only, UInt32& list, const Event& now) {
  if (list == 0) lists.push_back({only}), list = UInt32(lists.size());
  std::vector<Event>& all = lists[list - 1];
  const auto own = std::find_if(all.begin(), all.end(), [&](const Event& e) { return e.who == now.who; });
  if (own != all.end())
    *own = now;
  else
    all.push_back(now);
}

std::string Races::name(const Event& e) const {
  if (e.who < clocks.size()) return "thread " + std::to_string(e.who) + place_of(e.code);
  const auto agent = std::find_if(agents.begin(), agents.end(), [&](const auto& a) { return a.second == e.who; });
  switch (agent->first.first) {
    case Agent::copies:
      return "a copy (cp.async)";
    case Agent::products:
      return "a product (wgmma)";
    case Agent::bulk_copies:
      return "a bulk copy";
    case Agent::bulk_stores:
      return "a bulk store";
  }
  return "";
}

void Races::report(std::size_t cell, const Event& now, bool writes, const Event& before, bool wrote, bool only_fence) {
  if (!found.empty()) return;
  found = "race at byte " + std::to_string(cell * cell_bytes) + " of shared memory: " + name(now) +
          (writes ? " writes" : " reads") + " what " + name(before) + (wrote ? " wrote" : " read") +
          (only_fence ? ", without a proxy fence between them" : ", and nothing orders them");
}

}  // namespace tessera::emulated

namespace {

[[gnu::always_inline]] inline void look(const void* at, std::size_t bytes, tessera::emulated::Access access,
                                        const void* code) {
  using namespace tessera::emulated;
  if (at >= watched_begin && at < watched_end) Machine::here().accesses(at, bytes, access, code);
}

}  // namespace

using enum tessera::emulated::Access;

#define ACCESS(name, bytes, access) \
  void name(void* at) { look(at, bytes, access, __builtin_return_address(0)); }

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* at, unsigned long bytes) { look(at, bytes, read, __builtin_return_address(0)); }
void __tsan_write_range(void* at, unsigned long bytes) { look(at, bytes, write, __builtin_return_address(0)); }

ACCESS(__tsan_read1, 1, read)
ACCESS(__tsan_read2, 2, read)
ACCESS(__tsan_read4, 4, read)
ACCESS(__tsan_read8, 8, read)
ACCESS(__tsan_read16, 16, read)
ACCESS(__tsan_write1, 1, write)
ACCESS(__tsan_write2, 2, write)
ACCESS(__tsan_write4, 4, write)
ACCESS(__tsan_write8, 8, write)
ACCESS(__tsan_write16, 16, write)
ACCESS(__tsan_unaligned_read2, 2, read)
ACCESS(__tsan_unaligned_read4, 4, read)
ACCESS(__tsan_unaligned_read8, 8, read)
ACCESS(__tsan_unaligned_read16, 16, read)
ACCESS(__tsan_unaligned_write2, 2, write)
ACCESS(__tsan_unaligned_write4, 4, write)
ACCESS(__tsan_unaligned_write8, 8, write)
ACCESS(__tsan_unaligned_write16, 16, write)

// Of static variables' guards and shared pointers.
int __tsan_atomic32_fetch_add(volatile int* at, int x, int) { return __atomic_fetch_add(at, x, __ATOMIC_ACQ_REL); }
unsigned char __tsan_atomic8_load(const volatile unsigned char* at, int) {
  return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}

}  // extern "C"
