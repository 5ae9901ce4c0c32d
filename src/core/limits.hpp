// SPDX-License-Identifier: Apache-2.0
// How large a problem may be, and arithmetic with sizes that cannot wrap. Included by core/rules.cpp and
// core/check.cpp, which refuse what is larger, and by every planner. Implements docs/algorithm.md, "Limits".
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>

namespace tessera {

// With these, sums of positions, sizes and tiles stay far inside 64 bits; kernels need not look.
inline constexpr std::int64_t most_tokens = std::int64_t{1} << 48;  // of a tensor
inline constexpr std::int64_t most_sequences = std::numeric_limits<std::int32_t>::max();
inline constexpr std::int64_t most_heads = std::numeric_limits<std::int32_t>::max();
inline constexpr std::int64_t most_dims = 576, most_value_dims = 512;     // of a head: D and Dv, at DeepSeek's MLA
inline constexpr std::int64_t furthest_position = std::int64_t{1} << 48;  // from 0, either way
// What a view reaches over, and a workspace: no process can address more.
inline constexpr std::int64_t most_bytes = std::int64_t{1} << 56;

// Tensors expanded by stride 0 have sizes that no memory holds, so products of sizes may exceed 64 bits. Such a result
// stays at the largest number, which is beyond every limit, and whoever uses it compares it with one. No argument is
// negative.
inline constexpr std::int64_t beyond_limits = std::numeric_limits<std::int64_t>::max();

constexpr std::int64_t product(std::initializer_list<std::int64_t> factors) {
  std::int64_t result = 1;
  for (const std::int64_t factor : factors)
    if (__builtin_mul_overflow(result, factor, &result)) result = beyond_limits;
  return result;
}

constexpr std::int64_t sum(std::initializer_list<std::int64_t> terms) {
  std::int64_t result = 0;
  for (const std::int64_t term : terms)
    if (__builtin_add_overflow(result, term, &result)) result = beyond_limits;
  return result;
}

// To a multiple of `unit`.
constexpr std::int64_t rounded_up(std::int64_t size, std::int64_t unit) {
  return size > beyond_limits - unit ? beyond_limits : (size + unit - 1) / unit * unit;
}

}  // namespace tessera
