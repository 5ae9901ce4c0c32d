// What this machine does when nothing but one of its parts is involved: vector registers, the matrix unit, memory.
// Included by cli/bench*.cpp: a kernel's speed means little without the speed that is possible here and now.
// Method: docs/benchmarks.md.
#pragma once

#include <cstddef>
#include <vector>

namespace tessera::cli {

// Keeps the calling thread on one of its processors, number `part` of `parts` spread over all of them: they are not
// equally fast where other guests of the machine share them, and what is compared should run on the same one.
class OneProcessor {
 public:
  OneProcessor(int part, int parts);
  ~OneProcessor();
  OneProcessor(const OneProcessor&) = delete;
  OneProcessor& operator=(const OneProcessor&) = delete;

 private:
  std::vector<int> before;
};

// Operations per second (a fused multiply-add counts as two) of `threads` threads at once, each running for about
// `seconds`. With the widest vectors that the machine has.
double measure_fma_rate(int threads, double seconds);

// Operations per second of the matrix unit on bf16, tiles resident. Only where the kernel `amx` runs.
double measure_matrix_rate(int threads, double seconds);

// The same of dot products of pairs of bf16, in registers. Only where the kernel `avx512bf16` runs.
double measure_pairs_rate(int threads, double seconds);

// Bytes per second that the threads read, each its own part of the memory, again and again.
double measure_read_rate(const void* memory, std::size_t bytes, int threads, double seconds);

}  // namespace tessera::cli
