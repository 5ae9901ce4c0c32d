// SPDX-License-Identifier: Apache-2.0
// Memory that runs out, threads that cannot be had and allocations that pause, on purpose: linking faults.cpp replaces
// the C library's allocation functions and pthread_create in the whole test program, shared libraries included. With a
// sanitizer, which has allocation functions of its own, only operator new fails.
// Included by fault_test.cpp, fork_test.cpp, openmp_test.cpp and fake_memory_test.cpp.
#pragma once

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TESSERA_TEST_SANITIZED 1
#else
#define TESSERA_TEST_SANITIZED 0
#endif

namespace tessera::test {

enum class Failing {
  once,    // the n-th allocation
  always,  // the n-th and all that follow
};

// Counts this process's allocations from now on. n = 0: none fails.
void fail_allocations(long n, Failing failing = Failing::once);

// Counts this process's allocations from now on; the n-th calls `hook` in the thread that asks for memory.
void pause_at_allocation(long n, void (*hook)());

// Ends both. How many were counted (failed).
struct Allocations {
  long counted, failed;
};
Allocations stop_counting();

// Allocations by the shared library that holds this address (of four at most) neither count nor fail.
void spare_library(const void* address);

// From now on only so many threads can be made; -1: as many as the system allows.
void allow_threads(int count);

}  // namespace tessera::test
