// SPDX-License-Identifier: Apache-2.0
// DLPack's tensors as views of ours. Implements tessera/dlpack.h.
#include "tessera/dlpack.h"

#include "api/last_error.hpp"
#include "core/failure.hpp"

namespace {

using namespace tessera;

// DLPack's ABI, which has not changed since its first version.
struct DlTensor {
  void* data;
  std::int32_t device_type, device_id;
  std::int32_t ndim;
  std::uint8_t code, bits;
  std::uint16_t lanes;
  const std::int64_t* shape;
  const std::int64_t* strides;
  std::uint64_t byte_offset;
};
static_assert(sizeof(void*) != 8 || sizeof(DlTensor) == 48);

// DLPack's DLDataTypeCode.
enum Code : std::uint8_t {
  integer = 0,
  unsigned_integer = 1,
  floating = 2,
  bfloat = 4,
  boolean = 6,
  float8_e4m3fn = 10
};

std::int32_t type_of(const DlTensor& t) {
  if (t.lanes == 1) {
    if (t.code == floating && t.bits == 64) return TESSERA_F64;
    if (t.code == floating && t.bits == 32) return TESSERA_F32;
    if (t.code == floating && t.bits == 16) return TESSERA_F16;
    if (t.code == bfloat && t.bits == 16) return TESSERA_BF16;
    if (t.code == float8_e4m3fn && t.bits == 8) return TESSERA_E4M3;
    if (t.code == integer && t.bits == 64) return TESSERA_I64;
    if (t.code == integer && t.bits == 32) return TESSERA_I32;
    if (t.code == integer && t.bits == 8) return TESSERA_I8;
    if ((t.code == unsigned_integer || t.code == boolean) && t.bits == 8) return TESSERA_U8;
  }
  invalid("dl_tensor: has DLPack's type (code ", +t.code, ", bits ", +t.bits, ", lanes ", t.lanes,
          "); must be f64, f32, f16, bf16, e4m3fn, i64, i32, i8, u8 or bool, with one lane");
}

std::int32_t device_of(const DlTensor& t) {
  switch (t.device_type) {
    case 1:  // plain and pinned host memory
    case 3:
      return TESSERA_DEVICE_CPU;
    case 2:  // plain and managed memory
    case 13:
      return TESSERA_DEVICE_CUDA;
    case 7:  // whose data is a VkDeviceAddress here
      return TESSERA_DEVICE_VULKAN;
    default:
      invalid("dl_tensor: is on a device of DLPack's kind ", t.device_type, "; must be on CPU (1, 3), CUDA (2, ",
              "13) or Vulkan (7)");
  }
}

tessera_tensor view_of(const DlTensor& t) {
  tessera_tensor view;
  tessera_tensor_init(&view);
  if (t.ndim < 1 || t.ndim > 4) invalid("dl_tensor: has ", t.ndim, " dimensions; tensors have 1 to 4");
  if (!t.shape) invalid("dl_tensor: shape is NULL but ndim is ", t.ndim, "; it is required");
  view.type = type_of(t);
  view.ndim = t.ndim;
  view.device_type = device_of(t);
  view.device_id = view.device_type == TESSERA_DEVICE_CPU ? 0 : t.device_id;
  if (t.byte_offset % (t.bits / 8u) != 0)
    invalid("dl_tensor: byte_offset is ", t.byte_offset, "; must be a multiple of its elements' ", t.bits / 8,
            " bytes");
  view.data = t.data ? static_cast<char*>(t.data) + t.byte_offset : nullptr;
  std::int64_t stride = 1;
  for (int i = t.ndim; i-- > 0;) {
    view.shape[i] = t.shape[i];
    view.strides[i] = t.strides ? t.strides[i] : stride;
    if (!t.strides && __builtin_mul_overflow(stride, t.shape[i], &stride))
      invalid("dl_tensor: dimension ", i, " has size ", t.shape[i], "; the element count must fit 64 bits");
  }
  return view;
}

}  // namespace

extern "C" tessera_status tessera_tensor_from_dlpack(const void* dl_tensor, tessera_tensor* tensor) {
  return api::guarded([&] {
    if (!dl_tensor) invalid("dl_tensor: is NULL; it is required");
    if (!tensor) invalid("tensor: is NULL; it is required");
    *tensor = view_of(*static_cast<const DlTensor*>(dl_tensor));
  });
}
