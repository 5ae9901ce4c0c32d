// SPDX-License-Identifier: Apache-2.0
// Threads that take turns on one thread of the host: each has a stack of its own and runs until it gives way. Included
// by tests/emulated/machine.hpp, which makes hundreds and changes between them at every barrier.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::emulated {

// swapcontext asks the kernel for the signal mask twice each time, a third of a test's time. Where we know the calling
// convention, only the registers that it preserves are exchanged. Sanitizers follow swapcontext and nothing else.
// (With TESSERA_RACES it is ours.)
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && (!defined(__SANITIZE_THREAD__) || defined(TESSERA_RACES))

class Fiber {
 public:
  // Runs `entry` from its beginning when it is next entered; it must not return.
  void begin(void (*entry)()) {
    stack.resize(stack_bytes);
    auto top = reinterpret_cast<std::uintptr_t>(stack.data() + stack.size()) & ~std::uintptr_t{15};
    auto* frame = reinterpret_cast<void**>(top) - 8;  // six registers, the address to go to, and no caller
    for (int n = 0; n < 6; ++n) frame[n] = nullptr;
    frame[6] = reinterpret_cast<void*>(entry), frame[7] = nullptr;
    here = frame;
  }
  void enter() { exchange(&outside, here); }
  void leave() { exchange(&here, outside); }  // by the fiber itself

 private:
  static constexpr std::size_t stack_bytes = 256 << 10;

  // Saves this stack's registers and place, and goes on with another's.
  [[gnu::naked, gnu::noinline, gnu::no_sanitize("thread")]] static void exchange(void** /*saved*/, void* /*next*/) {
    asm("push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
        "mov %rsp, (%rdi)\n mov %rsi, %rsp\n"
        "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret");
  }

  std::vector<char> stack;
  void* here = nullptr;
  void* outside = nullptr;
};

#else

class Fiber {
 public:
  void begin(void (*entry)()) {
    stack.resize(stack_bytes);
    getcontext(&here);
    here.uc_stack.ss_sp = stack.data(), here.uc_stack.ss_size = stack.size();
    here.uc_link = nullptr;
    makecontext(&here, entry, 0);
  }
  void enter() { swapcontext(&outside, &here); }
  void leave() { swapcontext(&here, &outside); }

 private:
  static constexpr std::size_t stack_bytes = 256 << 10;

  std::vector<char> stack;
  ucontext_t here{}, outside{};
};

#endif

}  // namespace tessera::emulated
