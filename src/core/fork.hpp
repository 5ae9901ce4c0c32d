// SPDX-License-Identifier: Apache-2.0
// Whether this process is a forked child. Included by what a child cannot take over from its parent: the thread pool,
// OpenMP's threads, the GPU driver. See docs/cpu_kernels.md, "Memory that runs out, forks".
#pragma once

namespace tessera {

// How many forks lie between this process and the one that loaded the library.
unsigned fork_count();

// Whether forks are noticed. False only where the system had no memory for that; it is asked again each time.
bool forks_are_noticed();

}  // namespace tessera
