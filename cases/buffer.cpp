// SPDX-License-Identifier: Apache-2.0
// Buffers with arbitrary strides and poisoned guard zones, and rounding to each number format. Part of tessera_cases;
// see buffer.hpp. Implements the memory part of docs/numerics.md.
#include "cases/buffer.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace tessera::cases {

namespace {

// Significant bits and the exponent below which numbers are subnormal.
struct Format {
  int precision, smallest_exponent;
  double largest;
};
constexpr Format f32_format{24, -126, 0x1.fffffep127}, f16_format{11, -14, 65504}, bf16_format{8, -126, 0x1.fep127};
constexpr Format e4m3_format{4, -6, 448};

constexpr std::int64_t margin = 512;  // guard elements on both sides, more than a vector or tile row may overrun
constexpr std::int64_t nonsense_stride = -7'777'777'777'777'777;

constexpr int double_bias = 1023, double_fraction = 52;

int exponent_of(double x) {  // of a number that is not subnormal in float64
  return static_cast<int>(std::bit_cast<std::uint64_t>(x) >> double_fraction & 0x7FF) - double_bias;
}

double power_of_two(int exponent) {
  return std::bit_cast<double>(static_cast<std::uint64_t>(exponent + double_bias) << double_fraction);
}

double quantum(const Format& format, double x) {
  if (!std::isfinite(x)) return std::numeric_limits<double>::infinity();
  return power_of_two(std::max(exponent_of(x), format.smallest_exponent) - format.precision + 1);
}

// x below 2^51 in magnitude to the nearest integer, ties to even. The sum has no bits below 1 left; nearbyint is a
// call.
double to_integer(double x) {
  constexpr double no_fraction = 0x1.8p52;
  return (x + no_fraction) - no_fraction;
}

// Nearest value of the format, ties to even.
double quantize(const Format& format, double x) {
  if (x == 0 || !std::isfinite(x)) return x;
  const double unit = quantum(format, x), rounded = std::copysign(to_integer(x / unit) * unit, x);
  return std::abs(rounded) > format.largest ? std::copysign(std::numeric_limits<double>::infinity(), x) : rounded;
}

std::uint16_t f16_bits(double x) {
  const auto sign = static_cast<std::uint16_t>(std::signbit(x) ? 0x8000 : 0);
  if (std::isnan(x)) return 0x7e00;
  const double magnitude = std::abs(round_to(Type::f16, x));
  if (std::isinf(magnitude)) return static_cast<std::uint16_t>(sign | 0x7c00);
  if (magnitude < 0x1p-14) return static_cast<std::uint16_t>(sign | static_cast<int>(magnitude * 0x1p24));
  const int exponent = exponent_of(magnitude);
  const int mantissa = static_cast<int>(magnitude * power_of_two(10 - exponent)) - 1024;
  return static_cast<std::uint16_t>(sign | ((exponent + 15) << 10) | mantissa);
}

double f16_value(std::uint16_t bits) {
  const double sign = bits & 0x8000 ? -1 : 1;
  const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  if (exponent == 31) return mantissa ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  if (exponent == 0) return sign * mantissa * 0x1p-24;
  return sign * (1024 + mantissa) * power_of_two(exponent - 25);
}

// Beyond the largest number it saturates, as caches are written.
std::uint8_t e4m3_bits(double x) {
  const auto sign = static_cast<std::uint8_t>(std::signbit(x) ? 0x80 : 0);
  if (std::isnan(x)) return 0x7f;
  const double magnitude = std::abs(round_to(Type::e4m3, x));
  if (magnitude < 0x1p-6) return static_cast<std::uint8_t>(sign | static_cast<int>(magnitude * 0x1p9));
  const int exponent = exponent_of(magnitude);
  const int mantissa = static_cast<int>(magnitude * power_of_two(3 - exponent)) - 8;
  return static_cast<std::uint8_t>(sign | ((exponent + 7) << 3) | mantissa);
}

double e4m3_value(std::uint8_t bits) {
  const double sign = bits & 0x80 ? -1 : 1;
  const int exponent = (bits >> 3) & 15, mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return std::nan("");
  if (exponent == 0) return sign * mantissa * 0x1p-9;
  return sign * (8 + mantissa) * power_of_two(exponent - 10);
}

template <class T>
T load(const std::byte* p) {
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

template <class T>
void store(std::byte* p, T x) {
  std::memcpy(p, &x, sizeof x);
}

double decode(Type type, const std::byte* p) {
  switch (type) {
    case Type::f64:
      return load<double>(p);
    case Type::f32:
      return load<float>(p);
    case Type::f16:
      return f16_value(load<std::uint16_t>(p));
    case Type::bf16:
      return std::bit_cast<float>(static_cast<std::uint32_t>(load<std::uint16_t>(p)) << 16);
    case Type::i32:
      return load<std::int32_t>(p);
    case Type::i64:
      return static_cast<double>(load<std::int64_t>(p));
    case Type::e4m3:
      return e4m3_value(load<std::uint8_t>(p));
    case Type::i8:
      return load<std::int8_t>(p);
    default:
      return load<std::uint8_t>(p);
  }
}

void encode(Type type, std::byte* p, double x) {
  switch (type) {
    case Type::f64:
      return store(p, x);
    case Type::f32:
      return store(p, static_cast<float>(x));
    case Type::f16:
      return store(p, f16_bits(x));
    case Type::bf16: {
      const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(round_to(Type::bf16, x)));
      return store(p, static_cast<std::uint16_t>(bits >> 16));
    }
    case Type::i32:
      return store(p, static_cast<std::int32_t>(x));
    case Type::i64:
      return store(p, static_cast<std::int64_t>(x));
    case Type::e4m3:
      return store(p, e4m3_bits(x));
    case Type::i8:
      return store(p, static_cast<std::int8_t>(round_to(Type::i8, x)));
    default:
      return store(p, static_cast<std::uint8_t>(x));
  }
}

}  // namespace

std::size_t size_of(Type type) {
  switch (type) {
    case Type::f64:
    case Type::i64:
      return 8;
    case Type::f32:
    case Type::i32:
      return 4;
    case Type::f16:
    case Type::bf16:
      return 2;
    default:
      return 1;
  }
}

bool is_float(Type type) { return type <= Type::e5m2; }

const char* name_of(Type type) {
  static constexpr const char* names[] = {"f64", "f32", "f16", "bf16", "e4m3", "e5m2", "i32", "i64", "u8", "i8"};
  return names[static_cast<std::size_t>(type)];
}

double round_to(Type type, double x) {
  switch (type) {
    case Type::f32:
      return static_cast<float>(x);
    case Type::f16:
      return quantize(f16_format, x);
    case Type::bf16:
      return quantize(bf16_format, x);
    case Type::e4m3:
      return std::clamp(quantize(e4m3_format, x), -e4m3_format.largest, e4m3_format.largest);
    case Type::i8:
      return std::clamp(std::nearbyint(x), -128.0, 127.0);
    default:
      return x;
  }
}

double spacing(Type type, double x) {
  switch (type) {
    case Type::f32:
      return quantum(f32_format, x);
    case Type::f16:
      return quantum(f16_format, x);
    case Type::bf16:
      return quantum(bf16_format, x);
    default:
      return 0;
  }
}

Buffer::Buffer(Type type, const Shape& shape, const Layout& layout) {
  view.type = type;
  view.ndim = static_cast<std::int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), view.shape.begin());

  dense = layout.step == 1;
  std::int64_t extent = layout.step;
  for (int place = view.ndim - 1; place >= 0; --place) {
    const auto d = static_cast<std::size_t>(layout.order[static_cast<std::size_t>(place)]);
    view.strides[d] = (layout.broadcast >> d) & 1 ? 0 : extent;
    if (view.strides[d] != 0) extent = std::max<std::int64_t>(extent * shape[d], 1) + layout.gap;
    dense = dense && view.strides[d] != 0 && layout.gap == 0 && d == static_cast<std::size_t>(place);
  }

  origin = margin + layout.shift;
  const std::int64_t total = origin + extent + margin;
  memory.assign(static_cast<std::size_t>(total) * size_of(type), std::byte{0xFF});
  inside.assign(static_cast<std::size_t>(total), false);
  each([&](std::size_t, std::size_t at) { inside[at] = true; });
  view.data = memory.data() + static_cast<std::size_t>(origin) * size_of(type);
  if (!layout.nonsense) return;
  for (std::size_t d = 0; d < shape.size(); ++d)
    if (shape[d] == 1) view.strides[d] = nonsense_stride;
}

std::int64_t Buffer::offset(std::int64_t element) const {
  if (dense) return origin + element;
  std::int64_t at = origin;
  const auto add_strides = [&](auto rest) {
    using Number = decltype(rest);
    for (int d = view.ndim - 1; d >= 0; --d) {
      const auto n = static_cast<Number>(size(d));
      if (n > 1) at += static_cast<std::int64_t>(rest % n) * view.strides[static_cast<std::size_t>(d)];
      rest /= n;
    }
  };
  // Many processors divide 32 bits several times faster than 64.
  if (elements() <= std::numeric_limits<std::uint32_t>::max())
    add_strides(static_cast<std::uint32_t>(element));
  else
    add_strides(element);
  return at;
}

template <class Use>
void Buffer::each(const Use& use) const {
  if (elements() == 0) return;
  std::array<std::int64_t, 4> n{1, 1, 1, 1}, step{};
  for (int d = 0; d < view.ndim; ++d) {
    const auto place = static_cast<std::size_t>(4 - view.ndim + d);
    n[place] = size(d), step[place] = size(d) > 1 ? view.strides[static_cast<std::size_t>(d)] : 0;
  }
  std::size_t number = 0;
  for (std::int64_t a = 0; a < n[0]; ++a)
    for (std::int64_t b = 0; b < n[1]; ++b)
      for (std::int64_t c = 0; c < n[2]; ++c) {
        const std::int64_t row = origin + a * step[0] + b * step[1] + c * step[2];
        for (std::int64_t d = 0; d < n[3]; ++d) use(number++, static_cast<std::size_t>(row + d * step[3]));
      }
}

double Buffer::get(std::int64_t element) const {
  return decode(type(), memory.data() + static_cast<std::size_t>(offset(element)) * size_of(type()));
}

void Buffer::set(std::int64_t element, double value) {
  encode(type(), memory.data() + static_cast<std::size_t>(offset(element)) * size_of(type()), value);
}

bool Buffer::untouched(std::int64_t element) const {
  const auto first = memory.begin() + offset(element) * static_cast<std::int64_t>(size_of(type()));
  return std::all_of(first, first + static_cast<std::int64_t>(size_of(type())),
                     [](std::byte b) { return b == std::byte{0xFF}; });
}

std::string Buffer::index(std::int64_t element) const {
  std::int64_t below = view.elements();
  std::string text;
  for (int d = 0; d < view.ndim; ++d) {
    below /= size(d);
    text += d == 0 ? "[" : ",";
    text += std::to_string(element / below);
    element %= below;
  }
  text += "]";
  return text;
}

std::vector<double> Buffer::values() const {
  std::vector<double> all(static_cast<std::size_t>(elements()));
  each([&](std::size_t e, std::size_t at) { all[e] = decode(type(), memory.data() + at * size_of(type())); });
  return all;
}

void Buffer::fill(const std::vector<double>& values) {
  for (std::size_t e = 0; e < values.size(); ++e) set(static_cast<std::int64_t>(e), values[e]);
}

std::vector<std::uint64_t> Buffer::bits() const {
  std::vector<std::uint64_t> all(static_cast<std::size_t>(elements()), 0);
  each([&](std::size_t e, std::size_t at) {
    std::memcpy(&all[e], memory.data() + at * size_of(type()), size_of(type()));
  });
  return all;
}

// FNV-1a, eight bytes at a time: a step is a bijection, so no change of one word goes unnoticed.
std::uint64_t Buffer::fingerprint() const {
  std::uint64_t hash = 0xCBF29CE484222325;
  for (std::size_t first = 0; first < memory.size(); first += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, memory.data() + first, std::min<std::size_t>(8, memory.size() - first));
    hash = (hash ^ word) * 0x100000001B3;
  }
  return hash;
}

void Buffer::restore() { std::fill(memory.begin(), memory.end(), std::byte{0xFF}); }

bool Buffer::margins_intact() const {
  const std::size_t bytes = size_of(type());
  for (std::size_t e = 0; e < inside.size(); ++e) {
    if (inside[e]) continue;
    for (std::size_t i = 0; i < bytes; ++i)
      if (memory[e * bytes + i] != std::byte{0xFF}) return false;
  }
  return true;
}

}  // namespace tessera::cases
