// How many floating-point operations per second this machine does when nothing but registers is involved.
// Included by cli/bench.cpp: a kernel's speed means little without the speed that is possible here and now.
// Method: docs/benchmarks.md.
#pragma once

namespace tessera::cli {

// Operations per second (a fused multiply-add counts as two) of `threads` threads at once, each running for about
// `seconds`. With the widest vectors that the machine has.
double measure_fma_rate(int threads, double seconds);

}  // namespace tessera::cli
