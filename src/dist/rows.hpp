// SPDX-License-Identifier: Apache-2.0
// Tensors seen as [rows, heads, width], whatever their own order of dimensions is: how rows of a few heads are copied
// into and out of messages. Included by the executor. Implements docs/scale_out.md, "Tensors of a rank".
#pragma once

#include <cstddef>
#include <memory>

#include "dist/communicator.hpp"
#include "math/mask.hpp"
#include "tessera/types.hpp"

namespace tessera::dist {

Int64 element_bytes(Type type);

// A view; strides count elements.
struct RowView {
  std::byte* data = nullptr;
  Type type = Type::f32;
  Int64 rows = 0, heads = 0, width = 0;
  Int64 row_stride = 0, head_stride = 0, column_stride = 1;

  std::byte* at(Int64 row, Int64 head) const {
    return data + (row * row_stride + head * head_stride) * element_bytes(type);
  }
};

RowView token_rows(const Tensor& t);               // [T,H,D]
RowView number_rows(const Tensor& t);              // [H,T]
RowView pair_rows(const Tensor& t, Int64 tokens);  // [1,H|1,T|1,M|1]

// Rows that belong to the executor: contiguous [rows, heads, width].
struct Rows {
  Bytes memory;  // of the host; or
  std::shared_ptr<std::byte> on_device;
  Device device{};
  RowView view;

  Rows() = default;
  Rows(Rows&&) = default;
  Rows& operator=(Rows&&) = default;
  Rows(Type type, Int64 rows, Int64 heads, Int64 width);
  Rows(Device device, std::shared_ptr<std::byte> memory, Type type, Int64 rows, Int64 heads, Int64 width);
  bool on_host() const { return device.type == DeviceType::cpu; }
  float* floats(Int64 row = 0) { return reinterpret_cast<float*>(view.at(row, 0)); }
  // Some rows and heads as a tensor of a call: [1,rows,heads,width], and for one number each [1,heads,rows].
  Tensor tokens(Int64 row, Int64 rows, Range heads) const;
  Tensor numbers(Int64 row, Int64 rows, Range heads) const;
};

Int64 packed_bytes(const RowView& view, Int64 rows, Range heads);
// Rows and heads of a view to memory, [rows][heads][width]; and back. Both return the end of what they used.
std::byte* pack(std::byte* to, const RowView& from, Int64 row, Int64 rows, Range heads);
const std::byte* unpack(const std::byte* from, const RowView& to, Int64 row, Int64 rows, Range heads);

// The rows of f32 numbers in another type, rounded once.
Rows converted(const Rows& from, Type type, Int64 rows);

}  // namespace tessera::dist
