// SPDX-License-Identifier: Apache-2.0
// SHA-256 (FIPS 180-4), for keys and checksums of cache entries. A page of code instead of a dependency; its test uses
// the standard's test vectors. Included by src/cuda/jit.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::cuda {

class Sha256 {
 public:
  Sha256& add(std::string_view bytes);
  // Hashes the length first, so that ("ab","c") and ("a","bc") differ.
  Sha256& add_field(std::string_view bytes);
  std::string hex();  // 64 hex digits; call it once, last

 private:
  void block(const unsigned char* bytes);

  std::array<std::uint32_t, 8> state{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                     0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<unsigned char, 64> buffer{};
  std::uint64_t length = 0;
};

}  // namespace tessera::cuda
