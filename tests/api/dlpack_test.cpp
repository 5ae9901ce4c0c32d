// SPDX-License-Identifier: Apache-2.0
// DLPack's tensors as views: every field arrives, and what has no place is refused with nothing written.
// Links the archive. Implements include/tessera/dlpack.h; python/tests/test_numpy.py hands over what NumPy exports.
#include "tessera/dlpack.h"

#include <gtest/gtest.h>

#include <cstring>

namespace tessera::test {
namespace {

// DLPack's DLTensor, from its specification.
struct DlTensor {
  void* data;
  struct {
    std::int32_t device_type, device_id;
  } device;
  std::int32_t ndim;
  struct {
    std::uint8_t code, bits;
    std::uint16_t lanes;
  } dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

float memory[64];

struct Exported : DlTensor {
  std::int64_t sizes[5] = {2, 3, 4, 5, 6}, steps[5] = {-1, 7, 0, 2, 9};
  Exported() : DlTensor{memory, {1, 0}, 4, {2, 32, 1}, nullptr, nullptr, 0} { shape = sizes, strides = steps; }
  Exported(const Exported&) = delete;
};

TEST(DlPack, EveryFieldArrives) {
  Exported t;
  t.byte_offset = 8, t.device = {2, 3};
  const Tensor view = from_dlpack(&t);
  EXPECT_EQ(view.data, memory + 2);
  EXPECT_EQ(view.type, Type::f32);
  EXPECT_EQ(view.ndim, 4);
  EXPECT_EQ(view.device, (Device{DeviceType::cuda, 3}));
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(view.shape[i], t.sizes[i]);
    EXPECT_EQ(view.strides[i], t.steps[i]);
  }
}

TEST(DlPack, WithoutStridesItIsContiguous) {
  Exported t;
  t.strides = nullptr, t.ndim = 3;
  const Tensor view = from_dlpack(&t);
  EXPECT_EQ(view.strides, (std::array<std::int64_t, 4>{12, 4, 1, 0}));
  EXPECT_EQ(view.shape, (std::array<std::int64_t, 4>{2, 3, 4, 0}));
}

TEST(DlPack, EmptyTensorsHaveNoData) {
  Exported t;
  t.data = nullptr, t.sizes[1] = 0, t.byte_offset = 16;
  EXPECT_EQ(from_dlpack(&t).data, nullptr);
}

TEST(DlPack, TypesAndDevices) {
  const struct {
    std::uint8_t code, bits;
    Type type;
  } types[] = {{2, 64, Type::f64}, {2, 32, Type::f32}, {2, 16, Type::f16}, {4, 16, Type::bf16}, {10, 8, Type::e4m3},
               {0, 64, Type::i64}, {0, 32, Type::i32}, {0, 8, Type::i8},   {1, 8, Type::u8},    {6, 8, Type::u8}};
  for (const auto& row : types) {
    Exported t;
    t.dtype.code = row.code, t.dtype.bits = row.bits;
    EXPECT_EQ(from_dlpack(&t).type, row.type) << +row.code << " " << +row.bits;
  }
  const struct {
    std::int32_t kind;
    Device device;
  } devices[] = {{1, {DeviceType::cpu, 0}},
                 {3, {DeviceType::cpu, 0}},
                 {2, {DeviceType::cuda, 4}},
                 {13, {DeviceType::cuda, 4}},
                 {7, {DeviceType::vulkan, 4}}};
  for (const auto& row : devices) {
    Exported t;
    t.device = {row.kind, 4};
    EXPECT_EQ(from_dlpack(&t).device, row.device) << row.kind;
  }
}

void expect_refused(const void* given, const char* sentence) {
  tessera_tensor view, before;
  std::memset(&view, 0x5a, sizeof view);
  before = view;
  EXPECT_EQ(tessera_tensor_from_dlpack(given, &view), TESSERA_INVALID_ARGUMENT);
  EXPECT_STREQ(tessera_last_error(), sentence);
  EXPECT_EQ(std::memcmp(&view, &before, sizeof view), 0) << "a refused call has written";
}

TEST(DlPack, WhatHasNoPlaceIsRefused) {
  expect_refused(nullptr, "dl_tensor: is NULL; it is required");
  {
    Exported t;
    EXPECT_EQ(tessera_tensor_from_dlpack(&t, nullptr), TESSERA_INVALID_ARGUMENT);
    EXPECT_STREQ(tessera_last_error(), "tensor: is NULL; it is required");
    t.ndim = 5;
    expect_refused(&t, "dl_tensor: has 5 dimensions; tensors have 1 to 4");
    t.ndim = 0;
    expect_refused(&t, "dl_tensor: has 0 dimensions; tensors have 1 to 4");
  }
  Exported t;
  t.dtype.lanes = 4;
  expect_refused(&t,
                 "dl_tensor: has DLPack's type (code 2, bits 32, lanes 4); must be f64, f32, f16, bf16, e4m3fn, i64, "
                 "i32, i8, u8 or bool, with one lane");
  t.dtype = {5, 64, 1};
  expect_refused(&t,
                 "dl_tensor: has DLPack's type (code 5, bits 64, lanes 1); must be f64, f32, f16, bf16, e4m3fn, i64, "
                 "i32, i8, u8 or bool, with one lane");
  t.dtype = {2, 32, 1}, t.device.device_type = 8;
  expect_refused(&t, "dl_tensor: is on a device of DLPack's kind 8; must be on CPU (1, 3), CUDA (2, 13) or Vulkan (7)");
  t.device.device_type = 1, t.byte_offset = 6;
  expect_refused(&t, "dl_tensor: byte_offset is 6; must be a multiple of its elements' 4 bytes");
  t.byte_offset = 0, t.shape = nullptr;
  expect_refused(&t, "dl_tensor: shape is NULL but ndim is 4; it is required");
  t.shape = t.sizes, t.strides = nullptr, t.sizes[0] = t.sizes[2] = std::int64_t{1} << 40;
  expect_refused(&t, "dl_tensor: dimension 0 has size 1099511627776; the element count must fit 64 bits");
}

}  // namespace
}  // namespace tessera::test
