// The allocation functions and pthread_create that fail on demand; see faults.hpp.
#include "tests/faults.hpp"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <new>

namespace tessera::test {
namespace {

constinit std::atomic<bool> counting{false};
constinit std::atomic<long> counted{0}, failed{0}, chosen{0};
constinit std::atomic<Failing> failing{Failing::once};
constinit std::atomic<void (*)()> pause_hook{nullptr};
constinit std::atomic<int> threads_allowed{-1};

void begin(long n, Failing how, void (*hook)()) {
  counted = failed = 0;
  chosen = n, failing = how, pause_hook = hook;
  counting = true;
}

// Whether this allocation is to fail.
bool fails() {
  if (!counting) return false;
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

}  // namespace tessera::test

using tessera::test::fails;

#if TESSERA_TEST_SANITIZED

void* operator new(std::size_t bytes) {
  void* memory = fails() ? nullptr : std::malloc(bytes ? bytes : 1);
  if (!memory) throw std::bad_alloc();
  return memory;
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return fails() ? nullptr : std::malloc(bytes ? bytes : 1);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

#else

extern "C" {

void* __libc_malloc(std::size_t bytes);
void* __libc_calloc(std::size_t count, std::size_t bytes);
void* __libc_realloc(void* memory, std::size_t bytes);
void* __libc_memalign(std::size_t alignment, std::size_t bytes);

void* malloc(std::size_t bytes) { return fails() ? nullptr : __libc_malloc(bytes); }
void* calloc(std::size_t count, std::size_t bytes) { return fails() ? nullptr : __libc_calloc(count, bytes); }
void* realloc(void* memory, std::size_t bytes) { return fails() ? nullptr : __libc_realloc(memory, bytes); }
void* memalign(std::size_t alignment, std::size_t bytes) {
  return fails() ? nullptr : __libc_memalign(alignment, bytes);
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) { return memalign(alignment, bytes); }
int posix_memalign(void** memory, std::size_t alignment, std::size_t bytes) {
  void* made = memalign(alignment, bytes);
  if (!made) return ENOMEM;
  *memory = made;
  return 0;
}

}  // extern "C"

#endif

#if !TESSERA_TEST_SANITIZED

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*),
                              void* argument) {
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
