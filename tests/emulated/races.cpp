// SPDX-License-Identifier: Apache-2.0
// The search for races, and what the compiler calls for every access to memory (-fsanitize=thread), without a sanitizer
// behind it: accesses to a block's shared memory and to watched global memory go to the emulated machine. Linked into
// the tests of device code if TESSERA_RACES is on; see tests/emulated/races.hpp.
#include "tests/emulated/races.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <stdexcept>

#include "tests/emulated/machine.hpp"

namespace tessera::emulated {

namespace {

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

// --- what has happened to memory

Shadow::Shadow(const void* at, std::size_t bytes, std::size_t cell, std::string of) :
    begin(static_cast<const unsigned char*>(at)), end(begin + bytes), cell_bytes(cell), name(std::move(of)) {
  pages.resize(bytes / cell_bytes / page_cells + 1);
}

Shadow::Cell& Shadow::cell(std::size_t number) {
  std::unique_ptr<Cell[]>& page = pages[number / page_cells];
  if (!page) page = std::make_unique<Cell[]>(page_cells), used.push_back(number / page_cells);
  return page[number % page_cells];
}

void Shadow::clear() {
  for (const std::size_t page : used) std::fill_n(pages[page].get(), page_cells, Cell{});
  lists.clear(), unused.clear();
}

std::vector<Shadow::Event>& Shadow::list_of(const Event& only, UInt32& number) {
  if (number == 0) {
    if (unused.empty()) lists.emplace_back(), unused.push_back(UInt32(lists.size()));
    number = unused.back(), unused.pop_back();
    if (only.time > 0) list(number).push_back(only);
  }
  return list(number);
}
void Shadow::drop(UInt32& number) {
  if (number > 0) list(number).clear(), unused.push_back(number);
  number = 0;
}

// --- launches and blocks

void Races::begin_launch(int blocks, bool is_programmatic) {
  first_block = next_block, next_block += UInt32(blocks);
  programmatic = is_programmatic;
  if (!programmatic) known_at_start = first_block;  // else: no more than when the launch before began
  places.clear();
}

void Races::begin_block(BlockClocks& block, int index, const unsigned char* memory, std::size_t bytes, int threads) {
  block.number = first_block + UInt32(index), block.waited = false;
  block.agents.clear(), block.threads.assign(std::size_t(threads), {});
  for (UInt32 n = 0; n < UInt32(threads); ++n)
    raise(block.threads[n].known, n, 1), block.threads[n].complete = known_at_start;
  if (block.shared.begin == memory)
    block.shared.clear();
  else
    block.shared = Shadow(memory, bytes, 2, "shared memory");
  now = &block;
}

void Races::end_block() {
  if (programmatic && !now->waited && found.empty())
    throw std::runtime_error("a block of a programmatic launch ends without having waited for the launch before");
  now = nullptr;
}

void Races::wait_for_launch_before(std::size_t thread) { knower(thread).complete = first_block, now->waited = true; }

void Races::watch(const void* at, std::size_t bytes, std::size_t cell_bytes, const std::string& name) {
  if (bytes == 0) return;
  auto first = reinterpret_cast<std::uintptr_t>(at) & ~std::uintptr_t{3};
  auto last = reinterpret_cast<std::uintptr_t>(at) + bytes;
  std::string all = name;
  // Views of one buffer may lie between each other.
  std::erase_if(regions, [&](const Shadow& other) {
    const auto begin = reinterpret_cast<std::uintptr_t>(other.begin), end = reinterpret_cast<std::uintptr_t>(other.end);
    if (begin >= last || end <= first) return false;
    first = std::min(first, begin), last = std::max(last, end), cell_bytes = std::min(cell_bytes, other.cell_bytes);
    all = other.name + ", " + all;
    return true;
  });
  Shadow region(reinterpret_cast<const void*>(first), last - first, cell_bytes, all);
  const auto before = [](const Shadow& a, const Shadow& b) { return a.begin < b.begin; };
  regions.insert(std::upper_bound(regions.begin(), regions.end(), region, before), std::move(region));
}

void Races::forget() { regions.clear(), ticket_places.clear(), places.clear(); }

bool Races::watches(const void* at) const {
  if (regions.empty() || at < regions.front().begin || at >= regions.back().end) return false;
  return std::any_of(regions.begin(), regions.end(), [&](const Shadow& r) { return at >= r.begin && at < r.end; });
}

Shadow* Races::shadow_of(const void* at) {
  if (at >= now->shared.begin && at < now->shared.end) return &now->shared;
  for (Shadow& region : regions)
    if (at >= region.begin && at < region.end) return &region;
  return nullptr;
}

// --- what is known

// What a thread does after it has told others is none of what they know.
void Races::release(std::size_t thread, Clock& to) { join(to, knower(thread)), ++knower(thread).known[thread]; }
void Races::acquire(std::size_t thread, const Clock& from) { join(knower(thread), from); }
void Races::publish(std::size_t thread) {
  Knower& k = knower(thread);
  k.published = k.known, ++k.known[thread];
}
void Races::publish_global(std::size_t thread) {
  Knower& k = knower(thread);
  k.published_global = k.all(now->number), ++k.known[thread];
}

void Races::learn(std::size_t thread, Agent agent, const void* key, UInt32 time) {
  raise(knower(thread).known, number_of(agent, key), time);
}
void Races::announce(std::size_t thread, Agent agent, const void* key, UInt32 time, Clock& to) {
  join(to, knower(thread)), raise(to.known, number_of(agent, key), time);
}

void Races::fence(std::size_t thread, bool sc) {
  Knower& k = knower(thread);
  k.learn(k.observed, now->number), k.observed = nullptr;
  if (sc) k.learn(k.fences, now->number);
  k.fenced = k.all(now->number), ++k.known[thread];
  if (sc) k.fences = joined(k.fences, k.fenced);
}

void Races::strong(std::size_t thread, const void* at, Strong how) {
  if (std::find(ticket_places.begin(), ticket_places.end(), at) != ticket_places.end()) return;
  Knower& k = knower(thread);
  Place& place = places[at];
  const Pasts tells = k.fenced;
  if (how != Strong::add) {
    k.fences = joined(k.fences, place.fences);
    if (how == Strong::acquire)
      k.learn(place.released, now->number);
    else
      k.observed = joined(k.observed, place.released);
  }
  if (how == Strong::change || how == Strong::add)
    place.released = joined(place.released, tells), place.fences = joined(place.fences, k.fences);
}

bool Races::knows(const Knower& k, const Event& e) const {
  if (e.time == 0 || e.block < k.complete) return true;
  return e.block == now->number ? holds(k.known, e.who, e.time) : holds(k.others, e.block, e.who, e.time);
}

// What an ordinary instruction wrote, or another block's asynchronous one, the asynchronous proxy sees behind a fence
// only, in its own block. The end of an asynchronous operation is such a fence, for ordinary instructions.
bool Races::sees(const Knower& k, const Event& write, bool async, bool global) const {
  if (!knows(k, write)) return false;
  if (!async || write.time == 0 || (write.async && write.block == now->number)) return true;
  if (!global) return holds(k.published, write.who, write.time);
  return write.block < k.complete || holds(k.published_global, write.block, write.who, write.time);
}

UInt32 Races::number_of(Agent agent, const void* key) {
  return now->agents.try_emplace({agent, key}, UInt32(now->threads.size() + now->agents.size())).first->second;
}

// --- accesses

void Races::access(std::size_t thread, const void* at, std::size_t bytes, Access access, const void* code) {
  if (!now) return;
  const Knower& k = knower(thread);
  visit(k, {.who = UInt32(thread), .time = k.known[thread], .block = now->number, .code = code}, at, bytes, access);
}
void Races::access_by(Agent agent, const void* key, UInt32 time, std::size_t thread, const void* at, std::size_t bytes,
                      Access access) {
  if (!now) return;
  const Event by{.who = number_of(agent, key),
                 .time = time,
                 .block = now->number,
                 .async = agent != Agent::copies,
                 .agent = agent};
  visit(knower(thread), by, at, bytes, access);
}

// Whoever knows of the new event knows of those that it has known of, and those of its kind need not be kept.
void Races::add_after(const Knower& k, std::vector<Event>& to, const Event& by) const {
  std::erase_if(to, [&](const Event& e) { return e.async == by.async && (e.strong || !by.strong) && knows(k, e); });
  to.push_back(by);
}

void Races::visit(const Knower& k, Event by, const void* at, std::size_t bytes, Access access) {
  Shadow* const in = shadow_of(at);
  if (!in) return;
  const bool global = in != &now->shared, writes = access != Access::read && access != Access::strong_read;
  by.strong = access == Access::atomic || access == Access::strong_read;
  const auto seen = [&](const Event& write) { return sees(k, write, by.async, global); };
  const auto allowed = [&](const Event& before) { return by.strong && before.strong && by.async == before.async; };
  const auto offset = std::size_t(static_cast<const unsigned char*>(at) - in->begin);
  for (std::size_t n = offset / in->cell_bytes; n <= (offset + bytes - 1) / in->cell_bytes; ++n) {
    Shadow::Cell& cell = in->cell(n);
    const bool joins_writers = access == Access::same && !cell.write.async && !seen(cell.write);
    const Event* unseen = joins_writers || seen(cell.write) ? nullptr : &cell.write;
    if (!joins_writers && cell.writers > 0) {
      const std::vector<Event>& written = in->list(cell.writers);
      const bool needs_one = !writes && cell.same;
      const auto first = std::find_if_not(written.begin(), written.end(), seen);
      unseen = first == written.end() || (needs_one && std::any_of(written.begin(), written.end(), seen)) ? nullptr
                                                                                                          : &*first;
    }
    if (cell.atomics > 0)
      for (const Event& e : in->list(cell.atomics))
        if (!seen(e) && !allowed(e)) unseen = &e;
    if (unseen) return report(*in, n, by, writes, *unseen, true, knows(k, *unseen));
    if (!writes) {
      if (cell.readers == 0 && (cell.read.strong || !by.strong) && knows(k, cell.read))
        cell.read = by;
      else if (cell.readers > 0 || cell.read.who != by.who || cell.read.time != by.time || cell.read.block != by.block)
        add_after(k, in->list_of(cell.read, cell.readers), by);
      continue;
    }
    const Event* read = cell.readers ? in->list(cell.readers).data() : &cell.read;
    const Event* end = read + (cell.readers ? in->list(cell.readers).size() : 1);
    for (; access != Access::same && read < end; ++read)
      if (!knows(k, *read) && !allowed(*read)) return report(*in, n, by, writes, *read, false, false);
    if (access == Access::atomic) {
      add_after(k, in->list_of({}, cell.atomics), by);
    } else if (joins_writers) {
      in->list_of(cell.write, cell.writers).push_back(by), cell.same = true;
    } else {
      in->drop(cell.writers), in->drop(cell.readers), in->drop(cell.atomics);
      cell = {.write = by, .same = access == Access::same};
    }
  }
}

// --- words

std::string Races::name(const Event& e, bool with_block) const {
  static const char* const agents[] = {"thread ",     "a copy (cp.async)", "a product (wgmma)",
                                       "a bulk copy", "a bulk store",      "a bulk store"};
  std::string out = agents[int(e.agent)];
  if (e.agent == Agent::none) out += std::to_string(e.who);
  if (with_block)
    out += e.block < first_block ? " of an earlier launch" : " of block " + std::to_string(e.block - first_block);
  return out + place_of(e.code);
}

void Races::report(const Shadow& in, std::size_t cell, const Event& by, bool writes, const Event& before, bool wrote,
                   bool only_fence) {
  if (!found.empty()) return;
  const bool global = &in != &now->shared;
  found = "race at byte " + std::to_string(cell * in.cell_bytes) + " of " + in.name + ": " + name(by, global) +
          (writes ? " writes" : " reads") + " what " + name(before, global) + (wrote ? " wrote" : " read") +
          (only_fence ? ", without a proxy fence between them" : ", and nothing orders them");
}

}  // namespace tessera::emulated

namespace {

[[gnu::always_inline]] inline void look(const void* at, std::size_t bytes, tessera::emulated::Access access,
                                        const void* code) {
  tessera::emulated::Machine& machine = tessera::emulated::Machine::here();
  if (machine.is_watched(at)) machine.accesses(at, bytes, access, code);
}

}  // namespace

using tessera::emulated::Access;

#define ACCESS(name, bytes, access) \
  void name(void* at) { look(at, bytes, access, __builtin_return_address(0)); }

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* at, unsigned long bytes) { look(at, bytes, Access::read, __builtin_return_address(0)); }
void __tsan_write_range(void* at, unsigned long bytes) { look(at, bytes, Access::write, __builtin_return_address(0)); }

ACCESS(__tsan_read1, 1, Access::read)
ACCESS(__tsan_read2, 2, Access::read)
ACCESS(__tsan_read4, 4, Access::read)
ACCESS(__tsan_read8, 8, Access::read)
ACCESS(__tsan_read16, 16, Access::read)
ACCESS(__tsan_write1, 1, Access::write)
ACCESS(__tsan_write2, 2, Access::write)
ACCESS(__tsan_write4, 4, Access::write)
ACCESS(__tsan_write8, 8, Access::write)
ACCESS(__tsan_write16, 16, Access::write)
ACCESS(__tsan_unaligned_read2, 2, Access::read)
ACCESS(__tsan_unaligned_read4, 4, Access::read)
ACCESS(__tsan_unaligned_read8, 8, Access::read)
ACCESS(__tsan_unaligned_read16, 16, Access::read)
ACCESS(__tsan_unaligned_write2, 2, Access::write)
ACCESS(__tsan_unaligned_write4, 4, Access::write)
ACCESS(__tsan_unaligned_write8, 8, Access::write)
ACCESS(__tsan_unaligned_write16, 16, Access::write)

// Of static variables' guards and shared pointers.
int __tsan_atomic32_fetch_add(volatile int* at, int x, int) { return __atomic_fetch_add(at, x, __ATOMIC_ACQ_REL); }
// Of Machine::peek.
unsigned __tsan_atomic32_load(const volatile unsigned* at, int) { return __atomic_load_n(at, __ATOMIC_RELAXED); }
unsigned char __tsan_atomic8_load(const volatile unsigned char* at, int) {
  return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}

}  // extern "C"
