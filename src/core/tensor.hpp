// SPDX-License-Identifier: Apache-2.0
// Facts about tensor views: sizes of types, their names, text form, alignment, addresses of rows.
// Included by core and by every backend on the host; the view itself is public (tessera/types.hpp).
#pragma once

#include <cstdint>
#include <string>

#include "math/types.hpp"
#include "tessera/types.hpp"

namespace tessera {

std::int64_t size_of(Type type);
const char* name_of(Type type);
std::string name_of(Device device);
bool is_float(Type type);                        // one that arithmetic exists for: f64, f32, f16, bf16
std::string text_of(const Tensor& tensor);       // f32 [2,128,8,64]
std::string shape_text(const Tensor& tensor);    // [2,128,8,64]
std::string strides_text(const Tensor& tensor);  // the same for the strides

// The largest power of two, at most 16, that divides the address and every byte stride that is used. Null counts as 16.
int alignment_of(const Tensor& tensor);
// Whether a stride is one that tensor copies of a GPU do not take: negative, or 2^40 bytes or more.
bool has_far_stride(const Tensor& tensor);

// Element `index` of a buffer as double, and back with the type's rounding. e4m3 and i8 saturate.
double load_element(const void* data, Type type, std::int64_t index);
void store_element(void* data, Type type, std::int64_t index, double value);

// Strides of dimensions of size 1 or 0 are never read: they come out as 0.
inline std::int64_t stride(const Tensor& t, int dim) {
  const auto d = static_cast<std::size_t>(dim);
  return t.shape[d] <= 1 ? 0 : t.strides[d];
}

// Element i of an i32 [n] tensor in host memory: a length, an offset.
inline std::int64_t entry(const Tensor& t, std::int64_t i) {
  return static_cast<const std::int32_t*>(t.data)[i * stride(t, 0)];
}

// The same of an i64 [n] tensor: a position.
inline std::int64_t place_entry(const Tensor& t, std::int64_t i) {
  return static_cast<const std::int64_t*>(t.data)[i * stride(t, 0)];
}

}  // namespace tessera
