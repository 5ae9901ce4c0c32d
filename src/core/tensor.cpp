// SPDX-License-Identifier: Apache-2.0
// Facts about tensor views; see tensor.hpp.
#include "core/tensor.hpp"

#include <array>
#include <cstring>

#include "core/failure.hpp"
#include "math/odd.hpp"

namespace tessera {

std::int64_t size_of(Type type) {
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
    case Type::e4m3:
    case Type::e5m2:
    case Type::u8:
    case Type::i8:
      return 1;
  }
  return 0;  // not a type; check.cpp refuses it
}

const char* name_of(Type type) {
  switch (type) {
    case Type::f64:
      return "f64";
    case Type::f32:
      return "f32";
    case Type::f16:
      return "f16";
    case Type::bf16:
      return "bf16";
    case Type::e4m3:
      return "e4m3";
    case Type::e5m2:
      return "e5m2";
    case Type::i32:
      return "i32";
    case Type::i64:
      return "i64";
    case Type::u8:
      return "u8";
    case Type::i8:
      return "i8";
  }
  return "unknown";
}

std::string name_of(Device device) {
  switch (device.type) {
    case DeviceType::any:
      return "any";
    case DeviceType::cpu:
      return "cpu";
    case DeviceType::cuda:
      return text("cuda:", device.id);
    case DeviceType::vulkan:
      return text("vulkan:", device.id);
  }
  return text("device type ", static_cast<int>(device.type));
}

bool is_float(Type type) { return type == Type::f64 || type == Type::f32 || type == Type::f16 || type == Type::bf16; }

static std::string list_text(const std::array<std::int64_t, 4>& numbers, int count) {
  std::string out = "[";
  for (int i = 0; i < count; ++i) out += text(i ? "," : "", numbers[static_cast<std::size_t>(i)]);
  return out + "]";
}

std::string shape_text(const Tensor& tensor) { return list_text(tensor.shape, tensor.ndim); }
std::string strides_text(const Tensor& tensor) { return list_text(tensor.strides, tensor.ndim); }

std::string text_of(const Tensor& tensor) { return text(name_of(tensor.type), " ", shape_text(tensor)); }

int alignment_of(const Tensor& tensor) {
  std::uint64_t bits = 16 | reinterpret_cast<std::uintptr_t>(tensor.data);
  for (int i = 0; i + 1 < tensor.ndim; ++i)
    bits |= static_cast<std::uint64_t>(stride(tensor, i)) * static_cast<std::uint64_t>(size_of(tensor.type));
  return static_cast<int>(bits & (~bits + 1));
}

bool has_far_stride(const Tensor& tensor) {
  constexpr std::int64_t far = std::int64_t{1} << 40;
  for (int i = 0; i < tensor.ndim; ++i)
    if (stride(tensor, i) < 0 || stride(tensor, i) >= far / size_of(tensor.type)) return true;
  return false;
}

template <class T>
static T read(const void* data, std::int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + index * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
  return value;
}

template <class T>
static void write(void* data, std::int64_t index, T value) {
  std::memcpy(static_cast<char*>(data) + index * static_cast<std::int64_t>(sizeof(T)), &value, sizeof(T));
}

double load_element(const void* data, Type type, std::int64_t index) {
  switch (type) {
    case Type::f64:
      return read<double>(data, index);
    case Type::f32:
      return read<float>(data, index);
    case Type::f16:
      return widen(read<F16>(data, index));
    case Type::bf16:
      return widen(read<BF16>(data, index));
    case Type::i32:
      return read<std::int32_t>(data, index);
    case Type::e4m3:
      return widen(read<E4M3>(data, index));
    case Type::u8:
      return read<std::uint8_t>(data, index);
    case Type::i8:
      return read<std::int8_t>(data, index);
    default:
      throw Failure(TESSERA_INTERNAL, text("no element access for type ", name_of(type)));
  }
}

void store_element(void* data, Type type, std::int64_t index, double value) {
  switch (type) {
    case Type::f64:
      return write(data, index, value);
    case Type::f32:
      return write(data, index, static_cast<float>(value));
    case Type::f16:
      return write(data, index, narrow<F16>(to_f32_odd(value)));
    case Type::bf16:
      return write(data, index, narrow<BF16>(to_f32_odd(value)));
    case Type::e4m3:
      return write(data, index, narrow<E4M3>(to_f32_odd(value)));
    case Type::i8:
      return write(data, index, narrow<Int8>(to_f32_odd(value)));
    default:
      throw Failure(TESSERA_INTERNAL, text("no element access for type ", name_of(type)));
  }
}

}  // namespace tessera
