// The threads of an OpenMP runtime that is in the process anyway, PyTorch's for one; docs/architecture.md, "Threads".
// Included by core/parallel.cpp.
#pragma once

namespace tessera {

// Calls work(context) on several threads at once, this one among them, and returns when all have returned. False, and
// nothing is done: no runtime is loaded, it would use fewer than `threads` threads, it is busy with this thread or
// with another call from here, the process is a forked child, in which such runtimes hang, or $TESSERA_OPENMP is 0.
bool run_on_openmp(int threads, void (*work)(void*), void* context);

}  // namespace tessera
