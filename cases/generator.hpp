// SPDX-License-Identifier: Apache-2.0
// A small random generator whose numbers are the same on every machine and compiler.
// Included by cases/ and tests/. Integer arithmetic only: no std distribution, no libm.
// Implements nothing of the contract; docs/numerics.md names it as the source of every input.
#pragma once

#include <cstdint>

namespace tessera::cases {

// SplitMix64 (Steele, Lea, Flood 2014).
class Generator {
 public:
  explicit Generator(std::uint64_t seed, std::uint64_t stream = 0) : state(seed * 0x9E3779B97F4A7C15 + stream) {
    state = next() ^ stream;
  }

  std::uint64_t next() {
    std::uint64_t z = state += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  }

  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }  // [0, 1)
  bool chance(double probability) { return uniform() < probability; }
  std::int64_t between(std::int64_t low, std::int64_t high) {  // both inclusive
    return low + static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(high - low + 1));
  }

  // The sum of twelve uniform numbers approximates N(0,1) well enough for tests, and is bitwise the same everywhere.
  double normal() {
    double sum = -6;
    for (int word = 0; word < 3; ++word) {
      const std::uint64_t bits = next();
      for (int part = 0; part < 4; ++part) sum += static_cast<double>((bits >> (16 * part)) & 0xFFFF) * 0x1p-16;
    }
    return sum;
  }

 private:
  std::uint64_t state;
};

}  // namespace tessera::cases
