// SPDX-License-Identifier: Apache-2.0
// SHA-256; see sha256.hpp.
#include "cuda/jit/sha256.hpp"

#include <bit>
#include <cmath>

#include "core/once.hpp"

namespace tessera::cuda {
namespace {

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes: derived, not copied.
std::array<std::uint32_t, 64> make_constants() {
  std::array<std::uint32_t, 64> k{};
  std::size_t count = 0;
  for (unsigned n = 2; count < k.size(); ++n) {
    bool prime = true;
    for (unsigned d = 2; d * d <= n; ++d) prime = prime && n % d != 0;
    if (!prime) continue;
    const long double root = std::cbrt(static_cast<long double>(n));
    k[count++] = static_cast<std::uint32_t>((root - std::floor(root)) * 4294967296.0L);
  }
  return k;
}

}  // namespace

void Sha256::block(const unsigned char* bytes) {
  static constinit Once<const std::array<std::uint32_t, 64>> constants;
  const std::array<std::uint32_t, 64>& k = constants.get(make_constants);
  std::array<std::uint32_t, 64> w;
  for (std::size_t i = 0; i < 16; ++i)
    w[i] = std::uint32_t(bytes[4 * i]) << 24 | std::uint32_t(bytes[4 * i + 1]) << 16 |
           std::uint32_t(bytes[4 * i + 2]) << 8 | std::uint32_t(bytes[4 * i + 3]);
  for (std::size_t i = 16; i < 64; ++i) {
    const std::uint32_t a = w[i - 15], b = w[i - 2];
    w[i] = w[i - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ (a >> 3)) + w[i - 7] +
           (std::rotr(b, 17) ^ std::rotr(b, 19) ^ (b >> 10));
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (std::size_t i = 0; i < 64; ++i) {
    const std::uint32_t t1 =
        h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & f) ^ (~e & g)) + k[i] + w[i];
    const std::uint32_t t2 = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
  }
  const std::uint32_t sum[8] = {a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < 8; ++i) state[i] += sum[i];
}

Sha256& Sha256::add(std::string_view bytes) {
  for (const char c : bytes) {
    buffer[length++ % 64] = static_cast<unsigned char>(c);
    if (length % 64 == 0) block(buffer.data());
  }
  return *this;
}

Sha256& Sha256::add_field(std::string_view bytes) {
  std::uint64_t size = bytes.size();
  char prefix[8];
  for (char& c : prefix) c = static_cast<char>(size & 0xff), size >>= 8;
  return add({prefix, sizeof(prefix)}).add(bytes);
}

std::string Sha256::hex() {
  const std::uint64_t bits = length * 8;
  add(std::string_view("\x80", 1));
  while (length % 64 != 56) add(std::string_view("\0", 1));
  for (int shift = 56; shift >= 0; shift -= 8) {
    const char c = static_cast<char>(bits >> shift & 0xff);
    add({&c, 1});
  }
  std::string out;
  for (const std::uint32_t word : state)
    for (int shift = 28; shift >= 0; shift -= 4) out += "0123456789abcdef"[word >> shift & 15];
  return out;
}

}  // namespace tessera::cuda
