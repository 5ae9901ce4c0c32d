// SPDX-License-Identifier: Apache-2.0
// Implements cli/array.hpp.
// Conversions are those of src/math/types.hpp, which the kernels use too.
#include "cli/array.hpp"

#include <cstdlib>
#include <cstring>
#include <new>
#include <random>

#include "cli/failure.hpp"
#include "math/types.hpp"

namespace tessera::cli {
namespace {

constexpr std::size_t cache_line = 64;

template <class T>
T load(const void* base, std::int64_t i) {
  T x;
  std::memcpy(&x, static_cast<const char*>(base) + static_cast<std::size_t>(i) * sizeof(T), sizeof(T));
  return x;
}

template <class T>
void store(void* base, std::int64_t i, T x) {
  std::memcpy(static_cast<char*>(base) + static_cast<std::size_t>(i) * sizeof(T), &x, sizeof(T));
}

}  // namespace

void Array::Free::operator()(void* p) const { std::free(p); }

Array::Array(Type type, std::vector<std::int64_t> shape) : element(type), sizes(std::move(shape)), count(1) {
  std::int64_t bytes = static_cast<std::int64_t>(size_of(type));
  for (const std::int64_t n : sizes) {
    if (n < 0) throw Failure("an array cannot have the shape " + text_of(sizes) + ".");
    if (__builtin_mul_overflow(count, n, &count) || __builtin_mul_overflow(bytes, n, &bytes)) throw std::bad_alloc();
  }
  const std::size_t rounded = (static_cast<std::size_t>(bytes) + cache_line) / cache_line * cache_line;
  memory.reset(std::aligned_alloc(cache_line, rounded));
  if (!memory) throw std::bad_alloc();
  std::memset(memory.get(), 0, rounded);
}

Tensor Array::view() const {
  Tensor t;
  t.data = memory.get();
  t.type = element;
  t.ndim = static_cast<std::int32_t>(sizes.size());
  std::int64_t stride = 1;
  for (std::size_t d = sizes.size(); d-- > 0;) {
    t.shape[d] = sizes[d];
    t.strides[d] = stride;
    stride *= sizes[d];
  }
  return t;
}

double Array::at(std::int64_t i) const {
  const void* base = memory.get();
  switch (element) {
    case Type::f64:
      return load<double>(base, i);
    case Type::f32:
      return load<float>(base, i);
    case Type::f16:
      return widen(load<F16>(base, i));
    case Type::bf16:
      return widen(load<BF16>(base, i));
    case Type::i32:
      return load<std::int32_t>(base, i);
    case Type::i64:
      return static_cast<double>(load<std::int64_t>(base, i));
    default:
      return load<std::uint8_t>(base, i);
  }
}

void Array::set(std::int64_t i, double value) {
  void* base = memory.get();
  switch (element) {
    case Type::f64:
      return store(base, i, value);
    case Type::f32:
      return store(base, i, static_cast<float>(value));
    case Type::f16:
      return store(base, i, narrow<F16>(static_cast<float>(value)));
    case Type::bf16:
      return store(base, i, narrow<BF16>(static_cast<float>(value)));
    case Type::i32:
      return store(base, i, static_cast<std::int32_t>(value));
    case Type::i64:
      return store(base, i, static_cast<std::int64_t>(value));
    default:
      return store(base, i, static_cast<std::uint8_t>(value));
  }
}

Array converted(const Array& from, Type to) {
  Array result(to, from.shape());
  for (std::int64_t i = 0; i < from.elements(); ++i) result.set(i, from.at(i));
  return result;
}

Array random_normal(Type type, std::vector<std::int64_t> shape, std::uint64_t seed) {
  Array result(type, std::move(shape));
  std::mt19937_64 bits(seed);
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < result.elements(); ++i) result.set(i, normal(bits));
  return result;
}

std::string text_of(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (const std::int64_t n : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(n);
  return text + "]";
}

}  // namespace tessera::cli
