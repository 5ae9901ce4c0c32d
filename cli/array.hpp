// SPDX-License-Identifier: Apache-2.0
// Arrays that the command line owns: type, shape, memory. The library only ever sees views of them.
// Included by the commands and by cli/npy.
// Types and layouts: docs/algorithm.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cases/buffer.hpp"
#include "tessera/types.hpp"

namespace tessera::cli {

using cases::name_of;
using cases::size_of;

// Contiguous, last dimension fastest, aligned to a cache line, zero at first.
class Array {
 public:
  Array() = default;  // not given
  Array(Type type, std::vector<std::int64_t> shape);

  explicit operator bool() const { return !sizes.empty(); }
  Type type() const { return element; }
  const std::vector<std::int64_t>& shape() const { return sizes; }
  std::int64_t elements() const { return count; }
  std::size_t bytes() const { return static_cast<std::size_t>(count) * size_of(element); }

  template <class T>
  T* data() {
    return static_cast<T*>(memory.get());
  }
  template <class T>
  const T* data() const {
    return static_cast<const T*>(memory.get());
  }

  // A non-owning view for the library, of at most four dimensions; ndim is 0 when the array is not given.
  Tensor view() const;

  // One element as a float64, whatever the type.
  double at(std::int64_t i) const;
  void set(std::int64_t i, double value);

 private:
  struct Free {
    void operator()(void* p) const;
  };
  Type element = Type::f32;
  std::vector<std::int64_t> sizes;
  std::int64_t count = 0;
  std::unique_ptr<void, Free> memory;
};

// The same values in another type, rounded to nearest even.
Array converted(const Array& from, Type to);

// Normally distributed numbers, reproducible by seed. Benchmarks never time zeros, which run faster than real data.
Array random_normal(Type type, std::vector<std::int64_t> shape, std::uint64_t seed);

// "[1, 2048, 8, 64]"
std::string text_of(const std::vector<std::int64_t>& shape);

}  // namespace tessera::cli
