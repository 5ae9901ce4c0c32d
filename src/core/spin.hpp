// SPDX-License-Identifier: Apache-2.0
// Waiting for another thread that is at work and will soon be done; docs/cpu_kernels.md, "Threads".
// Included by core/parallel.cpp and cpu/run.cpp.
#pragma once

#include <thread>

namespace tessera {

// Until done() is true: busy-waits for some ten microseconds, then yields the processor between looks.
template <class Done>
void spin_until(Done done) {
  for (int looks = 0; !done(); ++looks) {
    if (looks >= 1000) {
      std::this_thread::yield();
      continue;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

}  // namespace tessera
