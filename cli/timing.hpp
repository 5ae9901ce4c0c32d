// SPDX-License-Identifier: Apache-2.0
// Wall-clock time of a call, repeated until the median is stable. Included by the commands that print times. Method:
// docs/benchmarks.md.
#pragma once

#include <algorithm>
#include <chrono>
#include <vector>

namespace tessera::cli {

template <class Call>
double seconds_of(const Call& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

inline double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// The median of at least `least` runs that take at least `seconds` together, after one warm-up run.
template <class Call>
double median_seconds(const Call& call, std::size_t least, double seconds) {
  call();
  std::vector<double> times;
  for (double sum = 0; times.size() < least || sum < seconds; sum += times.back()) times.push_back(seconds_of(call));
  return median(std::move(times));
}

}  // namespace tessera::cli
