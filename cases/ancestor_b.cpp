// SPDX-License-Identifier: Apache-2.0
// glibc's additive feedback generator (TYPE_3, seed 1) and the order in which ancestor B drew from it.
// Part of tessera_cases; see ancestor_b.hpp.
// Implements docs/numerics.md, "A forgotten factor".
#include "cases/ancestor_b.hpp"

#include <array>
#include <cstddef>

namespace tessera::cases {

namespace {

// r[i] = r[i-3] + r[i-31], the first 31 words from a Lehmer generator, 310 outputs thrown away.
class GlibcRand {
 public:
  GlibcRand() {
    std::int64_t word = 1;
    for (auto& r : state) {
      r = static_cast<std::uint32_t>(word);
      word = word * 16807 % 2147483647;
    }
    for (int n = 0; n < 310; ++n) next();
  }
  std::int32_t next() {
    const std::uint32_t sum = state[place] += state[(place + 28) % 31];  // 28 places ahead is 3 places back
    place = (place + 1) % 31;
    return static_cast<std::int32_t>(sum >> 1);
  }

 private:
  std::array<std::uint32_t, 31> state;
  std::size_t place = 3;  // words 31 to 33 repeat words 0 to 2
};

}  // namespace

AncestorB ancestor_b() {
  AncestorB problem;
  GlibcRand random;
  const auto draw = [&] { return 2.0f * static_cast<float>(random.next()) / 2147483647.0f - 1.0f; };
  for (std::int64_t n = 0; n < AncestorB::N * AncestorB::D; ++n) {
    problem.Q.push_back(draw());
    problem.K.push_back(draw());
    problem.V.push_back(draw());
    problem.dO.push_back(draw());
  }
  return problem;
}

}  // namespace tessera::cases
