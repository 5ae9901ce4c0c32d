// SPDX-License-Identifier: Apache-2.0
// Owned memory for one tensor, with arbitrary strides, gaps, and poisoned guard zones (margins) that are checked
// afterwards. Included by cases/, tests/ and the command line; depends on the public headers only. Implements the
// memory part of docs/numerics.md ("every buffer is surrounded by NaN").
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tessera/types.hpp"

namespace tessera::cases {

using Shape = std::vector<std::int64_t>;

// How a tensor lies in memory. The default is contiguous.
struct Layout {
  std::array<int, 4> order{0, 1, 2, 3};  // dimensions from the slowest to the fastest
  std::int64_t gap = 0;                  // padding elements after each run of every dimension but the fastest
  std::int64_t step = 1;                 // stride of the fastest dimension
  std::int64_t shift = 0;                // misalignment of the data pointer, in elements
  unsigned broadcast = 0;                // bit d set: dimension d has stride 0 (inputs only)
  bool nonsense = false;                 // dimensions of size 1 get out-of-bounds strides, which nobody may read
};

std::size_t size_of(Type type);
bool is_float(Type type);
const char* name_of(Type type);

// `x` rounded to `type` (nearest, ties to even; 8-bit types saturate); independent of the library's conversions.
double round_to(Type type, double x);

// The ulp of `type` at `x`; 0 for types without rounding here.
double spacing(Type type, double x);

// Every byte starts as 0xFF: NaN in each floating type, e4m3 included, -1 in integers. Only elements of the tensor may
// change.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Type type, const Shape& shape, const Layout& layout = {});
  Buffer(Buffer&&) noexcept = default;  // the view stays valid after a move, not after a copy
  Buffer& operator=(Buffer&&) noexcept = default;

  explicit operator bool() const { return view.ndim != 0; }
  const Tensor& tensor() const { return view; }
  Type type() const { return view.type; }
  std::int64_t elements() const { return view.elements(); }
  std::int64_t size(int dimension) const { return view.shape[static_cast<std::size_t>(dimension)]; }

  // Elements by their number in row-major order of the shape, whatever the strides are.
  double get(std::int64_t element) const;
  void set(std::int64_t element, double value);
  bool untouched(std::int64_t element) const;     // still poison (0xFF)
  std::string index(std::int64_t element) const;  // "[1,0,17,3]"

  std::vector<double> values() const;
  void fill(const std::vector<double>& values);

  // Bit patterns in row-major order, for bitwise comparison across layouts.
  std::vector<std::uint64_t> bits() const;
  std::uint64_t fingerprint() const;  // hash of all memory with margins: a call must not change an input's
  void restore();                     // poisons everything again (0xFF)

  // All of its memory, margins included: what a copy elsewhere must hold.
  std::span<std::byte> bytes() { return memory; }
  std::span<const std::byte> bytes() const { return memory; }

  bool margins_intact() const;

 private:
  std::int64_t offset(std::int64_t element) const;
  // Calls use(number, place in memory) for every element, in row-major order of the shape.
  template <class Use>
  void each(const Use& use) const;

  std::vector<std::byte> memory;
  std::vector<bool> inside;  // per element of memory: does the tensor use it
  std::int64_t origin = 0;   // element of memory where the view's data begin
  bool dense = false;        // elements lie side by side, in row-major order
  Tensor view;
};

}  // namespace tessera::cases
