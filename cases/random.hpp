// SPDX-License-Identifier: Apache-2.0
// Seeded random configurations in which every pair of options can occur, and pairwise coverage: how often each pair
// does. Included by tests/ and cli/check.cpp. Implements docs/numerics.md, "Random configurations".
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cases/case.hpp"

namespace tessera::cases {

// The case is a function of its own seed alone, so that a failing one is repeated by --seed N --count 1.
Case random_case(std::uint64_t seed);
std::string random_name(std::uint64_t seed);
// Seeds seed, seed + 1, ... : at least three options are active in each.
std::vector<Case> random_cases(std::uint64_t seed, std::size_t count);

// The same around tiles of 32, each small: for devices that are slow.
Case random_small_case(std::uint64_t seed);
std::string random_small_name(std::uint64_t seed);
std::vector<Case> random_small_cases(std::uint64_t seed, std::size_t count);

// The same with types and scales of K and V of their own; forward passes.
Case random_cache_case(std::uint64_t seed);
std::string random_cache_name(std::uint64_t seed);
std::vector<Case> random_cache_cases(std::uint64_t seed, std::size_t count);

// All options that are counted, and those that a case has.
const std::vector<std::string>& option_names();
std::vector<std::string> active_options(const Case& spec);

struct PairCounts {
  std::vector<std::vector<int>> count;  // [a][b], a < b, in the order of option_names()
  // Pairs that never occur although they could, as "a + b".
  std::vector<std::string> missing() const;
};
PairCounts count_pairs(const std::vector<Case>& cases);
// Why two options exclude each other; empty when they do not.
std::string infeasible(const std::string& a, const std::string& b);
std::string to_text(const PairCounts& pairs);

}  // namespace tessera::cases
