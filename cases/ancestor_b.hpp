// SPDX-License-Identifier: Apache-2.0
// Ancestor B's problem: 128 tokens by 32 dimensions in f32, inputs from glibc's rand() with its default seed.
// Included by `tessera demo` and by the tests that reproduce its printed figures, the wrong ones too.
// Implements docs/numerics.md, "A forgotten factor".
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::cases {

struct AncestorB {
  static constexpr std::int64_t N = 128, D = 32;
  std::vector<float> Q, K, V, dO;  // [N, D] each
};

// The same numbers on every machine: glibc's generator is part of this file, rand() itself is not called.
AncestorB ancestor_b();

}  // namespace tessera::cases
