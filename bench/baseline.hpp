// SPDX-License-Identifier: Apache-2.0
// The problem that baselines of the CPU benchmark solve (one sequence, [N,H,D], the same tensors as Tessera's), and
// their parallel loop. Included by bench/row_by_row.*, bench/unfused_blas.* and bench/cpu_baselines.cpp. Method:
// docs/benchmarks.md.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "tessera/types.hpp"

namespace tessera::bench {

struct Problem {
  Type type = Type::f32;
  std::int64_t queries = 0, keys = 0, heads = 0, kv_heads = 0, dim = 0;
  bool causal = false;  // bottom right
  int threads = 1;
  const void *q = nullptr, *k = nullptr, *v = nullptr;
  float scale() const { return 1 / __builtin_sqrtf(static_cast<float>(dim)); }
  // Keys that a query sees.
  std::int64_t visible(std::int64_t query) const { return causal ? keys - queries + query + 1 : keys; }
};

// Parallel loop with dynamic scheduling: calls task(index, thread) for every index.
template <class Task>
void parallel(std::int64_t count, int threads, const Task& task) {
  std::atomic<std::int64_t> next{0};
  const auto work = [&](int thread) {
    for (std::int64_t i; (i = next.fetch_add(1)) < count;) task(i, thread);
  };
  std::vector<std::thread> helpers;
  for (int t = 1; t < threads; ++t) helpers.emplace_back(work, t);
  work(0);
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace tessera::bench
