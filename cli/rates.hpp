// SPDX-License-Identifier: Apache-2.0
// Peak rates of this machine, by microbenchmarks: vector FMA, the matrix unit (AMX), memory bandwidth. Included by
// cli/bench*.cpp, which relate a kernel's speed to them (a roofline). Method: docs/benchmarks.md.
#pragma once

#include <cstddef>
#include <vector>

namespace tessera::cli {

// Pins the calling thread to one processor: number `part` of `parts`, spread evenly over those it may use. On a shared
// virtual machine processors are not equally fast, so measurements that are compared should run on the same one.
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

// Operations per second of the matrix unit (AMX) on bf16, operands resident in tile registers. Only where the kernel
// `amx` runs.
double measure_matrix_rate(int threads, double seconds);

// The same of bf16 dot products (AVX512_BF16), operands in registers. Only where the kernel `avx512bf16` runs.
double measure_pairs_rate(int threads, double seconds);

// Memory read bandwidth in bytes per second: each thread streams through its own part, repeatedly.
double measure_read_rate(const void* memory, std::size_t bytes, int threads, double seconds);

}  // namespace tessera::cli
