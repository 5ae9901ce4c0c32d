// SPDX-License-Identifier: Apache-2.0
// The allocation functions and pthread_create that fail on demand; see faults.hpp.
#include "tests/support/faults.hpp"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <new>

namespace tessera::test {
namespace {

constinit std::atomic<bool> counting{false};
constinit std::atomic<long> counted{0}, failed{0}, chosen{0};
constinit std::atomic<Failing> failing{Failing::once};
constinit std::atomic<void (*)()> pause_hook{nullptr};
constinit std::atomic<int> threads_allowed{-1};

struct Addresses {
  std::uintptr_t begin = 0, end = 0;
};
constinit Addresses spared[4];
constinit std::size_t spared_count = 0;

void begin(long n, Failing how, void (*hook)()) {
  counted = failed = 0;
  chosen = n, failing = how, pause_hook = hook;
  counting = true;
}

// Whether this allocation is to fail, which returns to `caller`.
bool fails(const void* caller) {
  if (!counting) return false;
  const auto address = reinterpret_cast<std::uintptr_t>(caller);
  for (std::size_t n = 0; n < spared_count; ++n)
    if (spared[n].begin <= address && address < spared[n].end) return false;
  const long number = ++counted, n = chosen;
  if (void (*hook)() = pause_hook) {
    if (number == n) hook();
    return false;
  }
  if (n == 0 || (failing == Failing::once ? number != n : number < n)) return false;
  ++failed;
  errno = ENOMEM;
  return true;
}

}  // namespace

void fail_allocations(long n, Failing how) { begin(n, how, nullptr); }
void pause_at_allocation(long n, void (*hook)()) { begin(n, Failing::once, hook); }
Allocations stop_counting() {
  counting = false;
  return {counted, failed};
}
void allow_threads(int count) { threads_allowed = count; }

void spare_library(const void* address) {
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* wanted) {
        std::uintptr_t end = 0;
        for (int n = 0; n < info->dlpi_phnum; ++n)
          if (const auto& part = info->dlpi_phdr[n]; part.p_type == PT_LOAD)
            end = std::max<std::uintptr_t>(end, info->dlpi_addr + part.p_vaddr + part.p_memsz);
        const auto at = reinterpret_cast<std::uintptr_t>(wanted);
        if (at < info->dlpi_addr || at >= end) return 0;
        if (spared_count < std::size(spared)) spared[spared_count++] = {info->dlpi_addr, end};
        return 1;
      },
      const_cast<void*>(address));
}

}  // namespace tessera::test

using tessera::test::fails;
#define TESSERA_FAILS fails(__builtin_return_address(0))

#if TESSERA_TEST_SANITIZED

void* operator new(std::size_t bytes) {
  void* memory = TESSERA_FAILS ? nullptr : std::malloc(bytes ? bytes : 1);
  if (!memory) throw std::bad_alloc();
  return memory;
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return TESSERA_FAILS ? nullptr : std::malloc(bytes ? bytes : 1);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

#else

extern "C" {

void* __libc_malloc(std::size_t bytes);
void* __libc_calloc(std::size_t count, std::size_t bytes);
void* __libc_realloc(void* memory, std::size_t bytes);
void* __libc_memalign(std::size_t alignment, std::size_t bytes);

void* malloc(std::size_t bytes) { return TESSERA_FAILS ? nullptr : __libc_malloc(bytes); }
void* calloc(std::size_t count, std::size_t bytes) { return TESSERA_FAILS ? nullptr : __libc_calloc(count, bytes); }
void* realloc(void* memory, std::size_t bytes) { return TESSERA_FAILS ? nullptr : __libc_realloc(memory, bytes); }
void* memalign(std::size_t alignment, std::size_t bytes) {
  return TESSERA_FAILS ? nullptr : __libc_memalign(alignment, bytes);
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) {
  return TESSERA_FAILS ? nullptr : __libc_memalign(alignment, bytes);
}
int posix_memalign(void** memory, std::size_t alignment, std::size_t bytes) {
  void* made = TESSERA_FAILS ? nullptr : __libc_memalign(alignment, bytes);
  if (!made) return ENOMEM;
  *memory = made;
  return 0;
}

}  // extern "C"

#endif

#if !TESSERA_TEST_SANITIZED

// Visible to libraries that are loaded later: a runtime's threads are counted too.
extern "C" [[gnu::visibility("default")]] int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                                                             void* (*start)(void*), void* argument) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static constinit std::atomic<void*> next{nullptr};
  if (!next) next = dlsym(RTLD_NEXT, "pthread_create");
  auto& left = tessera::test::threads_allowed;
  if (left >= 0 && left.fetch_sub(1) <= 0) {
    left = 0;
    return EAGAIN;
  }
  return reinterpret_cast<Create>(next.load())(thread, attributes, start, argument);
}

#endif
