// SPDX-License-Identifier: Apache-2.0
// Which elements dropout keeps, from the contract's definition. Part of tessera_cases; see model.hpp. Like the model it
// shares no code with src/. Implements docs/algorithm.md, "Dropout".
#include <array>
#include <cmath>

#include "cases/model.hpp"

namespace tessera::cases {

bool kept(std::uint64_t seed, std::uint64_t offset, double p_drop, std::int64_t b, std::int64_t h, std::int64_t i,
          std::int64_t j) {
  using Word = std::uint32_t;
  const auto philox = [](std::array<Word, 4> x, Word k0, Word k1) {
    for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9, k1 += 0xBB67AE85) {
      const std::uint64_t p0 = 0xD2511F53ULL * x[0], p1 = 0xCD9E8D57ULL * x[2];
      x = {static_cast<Word>(p1 >> 32) ^ x[1] ^ k0, static_cast<Word>(p1), static_cast<Word>(p0 >> 32) ^ x[3] ^ k1,
           static_cast<Word>(p0)};
    }
    return x;
  };
  const auto low = [](auto x) { return static_cast<Word>(x); };
  const auto key = philox({low(offset), low(offset >> 32), 0, 0}, low(seed), low(seed >> 32));
  const auto bits = philox({low((j >> 4) * 4 + ((j >> 1) & 3)), low(i >> 1), low(h), low(b)}, key[0], key[1]);
  const auto number = 4 * (i & 1) + 2 * ((j >> 3) & 1) + (j & 1);
  const Word value = (bits[static_cast<std::size_t>(number / 2)] >> (16 * (number % 2))) & 0xFFFF;
  return value >= static_cast<Word>(std::round(65536 * p_drop));
}

}  // namespace tessera::cases
