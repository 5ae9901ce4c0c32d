// SPDX-License-Identifier: Apache-2.0
// Rows of tensors in and out of messages; see rows.hpp.
#include "dist/rows.hpp"

#include <cstring>

namespace tessera::dist {

Int64 element_bytes(Type type) {
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

RowView token_rows(const Tensor& t) {
  return {static_cast<std::byte*>(t.data),
          t.type,
          t.shape[0],
          t.shape[1],
          t.shape[2],
          t.strides[0],
          t.strides[1],
          t.strides[2]};
}

RowView number_rows(const Tensor& t) {
  return {static_cast<std::byte*>(t.data), t.type, t.shape[1], t.shape[0], 1, t.strides[1], t.strides[0], 1};
}

RowView pair_rows(const Tensor& t, Int64 tokens) {
  return {static_cast<std::byte*>(t.data),           t.type,       tokens,      t.shape[1], t.shape[3],
          t.shape[2] == 1 ? Int64(0) : t.strides[2], t.strides[1], t.strides[3]};
}

Rows::Rows(Type type, Int64 rows, Int64 heads, Int64 width) :
    memory(static_cast<std::size_t>(rows * heads * width * element_bytes(type))), view{memory.data(), type,
                                                                                       rows,          heads,
                                                                                       width,         heads * width,
                                                                                       width,         1} {}

Rows::Rows(Device device, std::shared_ptr<std::byte> memory, Type type, Int64 rows, Int64 heads, Int64 width) :
    on_device(std::move(memory)),
    device(device), view{on_device.get(), type, rows, heads, width, heads * width, width, 1} {}

Tensor Rows::tokens(Int64 row, Int64 rows, Range heads) const {
  Tensor t(view.at(row, heads.begin), view.type, {1, rows, heads.size(), view.width}, device);
  t.strides = {0, view.row_stride, view.head_stride, 1};
  return t;
}

Tensor Rows::numbers(Int64 row, Int64 rows, Range heads) const {
  Tensor t(view.at(row, heads.begin), view.type, {1, heads.size(), rows}, device);
  t.strides = {0, view.head_stride, view.row_stride, 0};
  return t;
}

Int64 packed_bytes(const RowView& view, Int64 rows, Range heads) {
  return rows * heads.size() * view.width * element_bytes(view.type);
}

namespace {

// copy(row of the view, its place in packed memory) for every row and head.
template <class Copy>
void for_each_row(const RowView& view, Int64 row, Int64 rows, Range heads, Copy copy) {
  const Int64 bytes = view.width * element_bytes(view.type);
  Int64 offset = 0;
  for (Int64 r = row; r < row + rows; ++r)
    for (Int64 h = heads.begin; h < heads.end; ++h, offset += bytes) copy(view.at(r, h), offset);
}

bool is_dense(const RowView& view) { return view.column_stride == 1 || view.width == 1; }

}  // namespace

std::byte* pack(std::byte* to, const RowView& from, Int64 row, Int64 rows, Range heads) {
  const auto element = static_cast<std::size_t>(element_bytes(from.type));
  const auto width = static_cast<std::size_t>(from.width);
  for_each_row(from, row, rows, heads, [&](const std::byte* source, Int64 offset) {
    if (is_dense(from)) {
      std::memcpy(to + offset, source, width * element);
      return;
    }
    for (Int64 i = 0; i < from.width; ++i)
      std::memcpy(to + offset + i * Int64(element), source + i * from.column_stride * Int64(element), element);
  });
  return to + packed_bytes(from, rows, heads);
}

const std::byte* unpack(const std::byte* from, const RowView& to, Int64 row, Int64 rows, Range heads) {
  const auto element = static_cast<std::size_t>(element_bytes(to.type));
  const auto width = static_cast<std::size_t>(to.width);
  for_each_row(to, row, rows, heads, [&](std::byte* place, Int64 offset) {
    if (is_dense(to)) {
      std::memcpy(place, from + offset, width * element);
      return;
    }
    for (Int64 i = 0; i < to.width; ++i)
      std::memcpy(place + i * to.column_stride * Int64(element), from + offset + i * Int64(element), element);
  });
  return from + packed_bytes(to, rows, heads);
}

Rows converted(const Rows& from, Type type, Int64 rows) {
  Rows out(type, rows, from.view.heads, from.view.width);
  const auto* source = reinterpret_cast<const float*>(from.memory.data());
  const Int64 count = rows * from.view.heads * from.view.width;
  const auto to = [&](auto* place) {
    using T = std::remove_pointer_t<decltype(place)>;
    for (Int64 i = 0; i < count; ++i) place[i] = narrow<T>(source[i]);
  };
  if (type == Type::f16)
    to(reinterpret_cast<F16*>(out.memory.data()));
  else if (type == Type::bf16)
    to(reinterpret_cast<BF16*>(out.memory.data()));
  else
    to(reinterpret_cast<float*>(out.memory.data()));
  return out;
}

}  // namespace tessera::dist
