// SPDX-License-Identifier: Apache-2.0
// What the suites of `tessera bench` share: the arguments, a shape and its operations; and the suites that run on a
// GPU. Included by cli/bench.cpp and cli/bench_*.cpp. Method: docs/benchmarks.md.
#pragma once

#include <cstdint>
#include <string>

#include "cli/array.hpp"
#include "cli/options.hpp"
#include "cli/report.hpp"

namespace tessera::cli {

struct BenchArguments {
  std::string suite, json;  // suite "": the usual one of the device
  int repeat = 0;           // 0: until the median is stable
  ExecutionFlags execution;
};

// One pass of one shape; measured full and causal.
struct BenchShape {
  Type type;
  std::int64_t N, D;
  bool backward;
  std::int64_t B = 1, H = 8;

  // 4 B H Nq Nk D operations forward; the backward pass has five matrix products instead of two.
  double operations() const { return (backward ? 2.5 : 1.0) * 4.0 * static_cast<double>(B * H * N * N * D); }
  double operations(bool causal) const { return operations() / (causal ? 2 : 1); }
  const char* pass() const { return backward ? "backward" : "forward"; }
};

// A share of a limit as a bar of ten and a number: "#######    0.68".
inline constexpr int share_width = 28;
std::string share_text(double share);

int bench_scaling(const BenchArguments& arguments);  // one thread against all of them; bench_scaling.cpp
Json bench_decode(const BenchArguments& arguments);  // one query against many keys; bench_decode.cpp
// Every GPU kernel against the simplest, `naive` or `vk_naive`; `tiny` is a small one. bench_ladder.cpp
int bench_ladder(const BenchArguments& arguments);
int bench_gpu(const BenchArguments& arguments);         // one kernel in every type; bench_ladder.cpp
int bench_gpu_decode(const BenchArguments& arguments);  // one query against many keys; bench_gpu_decode.cpp
int bench_first_call(const BenchArguments& arguments);  // this process's first call; bench_host.cpp

// Host overhead, printed and as JSON: seconds of a cold first call, microseconds of a warm one; bench_host.cpp.
Json measure_first_calls();
Json measure_repeated_calls();

}  // namespace tessera::cli
