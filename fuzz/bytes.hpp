// SPDX-License-Identifier: Apache-2.0
// A fuzzer's input as numbers and choices, read from the front, and how a target reports what it finds.
// Included by every file of fuzz/. A spent input gives zeros, and zero is the ordinary choice everywhere: a short input
// is an ordinary call, and a change near the end of an input keeps the meaning of what stands before it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>

namespace tessera::fuzz {

// libFuzzer keeps the input of a process that aborts.
[[noreturn]] inline void finding(const std::string& what) {
  std::fprintf(stderr, "FINDING: %s\n", what.c_str());
  std::abort();
}

class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : rest(reinterpret_cast<const char*>(data), size) {}

  bool spent() const { return rest.empty(); }
  std::uint8_t byte() {
    if (rest.empty()) return 0;
    const auto value = static_cast<std::uint8_t>(rest.front());
    rest.remove_prefix(1);
    return value;
  }
  template <class T>
  T raw() {
    T value{};
    char bytes[sizeof(T)];
    for (char& b : bytes) b = static_cast<char>(byte());
    std::memcpy(&value, bytes, sizeof(T));
    return value;
  }

  bool flag() { return (byte() & 1) != 0; }
  bool rarely() { return byte() >= 240; }  // one in sixteen
  std::int64_t below(std::int64_t n) { return (n <= 256 ? byte() : raw<std::uint16_t>()) % n; }
  template <class T, std::size_t N>
  T pick(const T (&from)[N]) {
    return from[below(static_cast<std::int64_t>(N))];
  }

  // Small numbers, neighbours of powers of two with either sign, or anything.
  std::int64_t integer() {
    const std::uint8_t kind = byte();
    if (kind < 64) return kind;
    if (kind < 96) return 63 - kind;
    if (kind >= 240) return raw<std::int64_t>();
    const std::uint64_t power = std::uint64_t{1} << (kind % 64), near = static_cast<std::uint64_t>(raw<std::int8_t>());
    return static_cast<std::int64_t>((kind & 64) != 0 ? power + near : near - power);
  }

  // Numbers of ordinary size, the ends of ranges, what is not a number, or anything.
  double number() {
    constexpr double infinity = std::numeric_limits<double>::infinity();
    static constexpr double special[] = {0,
                                         -0.0,
                                         1,
                                         -1,
                                         infinity,
                                         -infinity,
                                         1e18,
                                         1e-18,
                                         1.1e18,
                                         0.9e-18,
                                         1e300,
                                         std::numeric_limits<double>::quiet_NaN(),
                                         5e-324,
                                         -1e18,
                                         0x1p-17,
                                         1 - 0x1p-18,
                                         std::numeric_limits<double>::max(),
                                         65535 / 65536.0};
    const std::uint8_t kind = byte();
    if (kind < 128) return static_cast<double>(kind) / 16;
    if (kind >= 240) return raw<double>();
    return special[(kind - 128U) % std::size(special)];
  }

  // Up to `most` characters.
  std::string text(std::size_t most) {
    std::string out;
    for (std::size_t n = byte() % (most + 1); n > 0; --n) out += static_cast<char>(byte());
    return out;
  }

 private:
  std::string_view rest;
};

}  // namespace tessera::fuzz
