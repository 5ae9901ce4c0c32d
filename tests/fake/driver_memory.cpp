// SPDX-License-Identifier: Apache-2.0
// The fake libcuda's memory, streams and tensor maps, and what it does not have; see driver.cpp and machine.hpp.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "tests/fake/inside.hpp"

using namespace tessera;
using namespace tessera::cuda;
using fake::machine;
using fake::refuse;

namespace tessera::fake {

Stream* stream_of(StreamHandle handle) {
  for (Stream& stream : machine().streams)
    if (static_cast<void*>(&stream) == handle) return &stream;
  return nullptr;
}

namespace {

constexpr std::size_t page = 4096;

Status copy(void* host, DevicePointer address, std::size_t bytes, bool to_device) {
  std::size_t at = 0;
  Allocation* memory = allocation_of(address, bytes, at);
  if (!memory) return refuse(invalid_value, "a copy of ", bytes, " bytes at ", address, " leaves its allocation");
  memory->content.resize(memory->bytes);
  if (to_device) std::memcpy(memory->content.data() + at, host, bytes);
  if (!to_device) std::memcpy(host, memory->content.data() + at, bytes);
  return success;
}

// Of the rules of cuTensorMapEncodeTiled, those for maps without interleaving. Swizzles: 0 (none) to 3 (128 bytes).
Status check_map(const void* map, int type, const EncodedMap& m, const std::uint32_t* steps, int interleave,
                 int swizzle) {
  constexpr int float16 = 6, bfloat16 = 9, element_bytes = 2, swizzle_bytes[] = {0, 32, 64, 128};
  if (type != float16 && type != bfloat16) return refuse(invalid_value, "tensor map: element type is ", type);
  if (reinterpret_cast<std::uintptr_t>(map) % 64 != 0) return refuse(invalid_value, "tensor map: not at 64 bytes");
  if (m.rank < 1 || m.rank > 4 || interleave != 0) return refuse(invalid_value, "tensor map: rank is ", m.rank);
  if (m.address % 16 != 0) return refuse(invalid_value, "tensor map: address is ", m.address);
  for (int d = 0; d < m.rank; ++d) {
    if (m.shape[d] < 1 || m.shape[d] > std::uint64_t{1} << 32)
      return refuse(invalid_value, "tensor map: shape[", d, "] is ", m.shape[d]);
    if (m.box[d] < 1 || m.box[d] > 256) return refuse(invalid_value, "tensor map: box[", d, "] is ", m.box[d]);
    if (steps[d] < 1 || steps[d] > 8) return refuse(invalid_value, "tensor map: element stride ", steps[d]);
    if (d > 0 && (m.strides[d - 1] % 16 != 0 || m.strides[d - 1] >= std::uint64_t{1} << 40))
      return refuse(invalid_value, "tensor map: stride of dimension ", d, " is ", m.strides[d - 1]);
  }
  const std::uint32_t inner = m.box[0] * element_bytes;
  if (inner % 16 != 0) return refuse(invalid_value, "tensor map: rows of the box have ", inner, " bytes");
  if (swizzle < 0 || swizzle > 3 || (swizzle > 0 && inner > static_cast<std::uint32_t>(swizzle_bytes[swizzle])))
    return refuse(invalid_value, "tensor map: rows of ", inner, " bytes in swizzle ", swizzle);
  return success;
}

}  // namespace
}  // namespace tessera::fake

extern "C" {

// Addresses that nobody can read or write, with pages of nobody's around them: whoever takes a device's pointer for the
// host's dies, and what leaves one allocation is not in another.
Status cuMemAlloc_v2(DevicePointer* pointer, std::size_t bytes) {
  ENTER("cuMemAlloc");
  if (bytes == 0) return refuse(fake::invalid_value, "cuMemAlloc: 0 bytes");
  if (fake::context_stack().empty()) return refuse(fake::invalid_context, "cuMemAlloc: nothing is current");
  const std::size_t reserved = (bytes / fake::page + 3) * fake::page;
  void* base = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return refuse(fake::out_of_memory, "cuMemAlloc: ", bytes, " bytes");
  const auto address = reinterpret_cast<std::uintptr_t>(base) + fake::page;
  machine().allocations[address] = {
      .device = fake::device_of(fake::context_stack().back()), .bytes = bytes, .reserved = reserved};
  *pointer = address;
  return fake::success;
}

Status cuMemFree_v2(DevicePointer pointer) {
  COUNT("cuMemFree", false);
  const auto found = machine().allocations.find(pointer);
  if (found == machine().allocations.end()) return refuse(fake::invalid_value, "cuMemFree: not an allocation");
  munmap(reinterpret_cast<void*>(pointer - fake::page), found->second.reserved);
  machine().allocations.erase(found);
  return fake::success;
}

Status cuMemcpyHtoDAsync_v2(DevicePointer to, const void* from, std::size_t bytes, StreamHandle) {
  ENTER("cuMemcpyHtoDAsync");
  return fake::copy(const_cast<void*>(from), to, bytes, true);
}

Status cuMemcpyDtoHAsync_v2(void* to, DevicePointer from, std::size_t bytes, StreamHandle) {
  ENTER("cuMemcpyDtoHAsync");
  return fake::copy(to, from, bytes, false);
}

// Row by row, by way of the host.
Status cuMemcpy2DAsync_v2(const Copy2D* c, StreamHandle) {
  ENTER("cuMemcpy2DAsync");
  if (c->from_pitch < c->width || c->to_pitch < c->width)
    return refuse(fake::invalid_value, "cuMemcpy2DAsync: rows of ", c->width, " bytes are ", c->from_pitch, " and ",
                  c->to_pitch, " apart");
  std::vector<unsigned char> row(c->width);
  for (std::size_t y = 0; y < c->height; ++y) {
    Status status = fake::success;
    if (c->from_type == Copy2D::host)
      std::memcpy(row.data(), static_cast<const char*>(c->from_host) + y * c->from_pitch, c->width);
    else
      status = fake::copy(row.data(), c->from_device + y * c->from_pitch, c->width, false);
    if (status == fake::success && c->to_type == Copy2D::host)
      std::memcpy(static_cast<char*>(c->to_host) + y * c->to_pitch, row.data(), c->width);
    else if (status == fake::success)
      status = fake::copy(row.data(), c->to_device + y * c->to_pitch, c->width, true);
    if (status != fake::success) return status;
  }
  return fake::success;
}

Status cuMemsetD8Async(DevicePointer to, unsigned char value, std::size_t bytes, StreamHandle) {
  ENTER("cuMemsetD8Async");
  std::vector<unsigned char> row(bytes, value);
  return fake::copy(row.data(), to, bytes, true);
}

// --- streams

Status cuStreamCreate(StreamHandle* stream, unsigned) {
  ENTER("cuStreamCreate");
  if (fake::context_stack().empty()) return refuse(fake::invalid_context, "cuStreamCreate: nothing is current");
  machine().streams.push_back({fake::context_stack().back()});
  *stream = reinterpret_cast<StreamHandle>(&machine().streams.back());
  return fake::success;
}

Status cuStreamDestroy_v2(StreamHandle stream) {
  COUNT("cuStreamDestroy", false);
  if (!fake::stream_of(stream)) return refuse(fake::invalid_handle, "cuStreamDestroy: not a stream");
  machine().streams.remove_if([&](const fake::Stream& s) { return static_cast<const void*>(&s) == stream; });
  return fake::success;
}

Status cuStreamSynchronize(StreamHandle) {
  ENTER("cuStreamSynchronize");
  return fake::success;
}

Status cuStreamQuery(StreamHandle stream) {
  ENTER("cuStreamQuery");
  if (!fake::stream_of(stream)) return refuse(fake::invalid_handle, "cuStreamQuery: not a stream");
  return machine().busy && machine().busy(stream) ? fake::not_ready : fake::success;
}

// --- tensor maps

Status cuTensorMapEncodeTiled(void* map, int type, std::uint32_t rank, void* address, const std::uint64_t* shape,
                              const std::uint64_t* strides, const std::uint32_t* box, const std::uint32_t* steps,
                              int interleave, int swizzle, int, int) {
  ENTER("cuTensorMapEncodeTiled");
  fake::EncodedMap m{};
  m.address = reinterpret_cast<std::uintptr_t>(address), m.type = type, m.rank = static_cast<int>(rank);
  for (std::uint32_t d = 0; d < std::min(rank, 4U); ++d) m.shape[d] = shape[d], m.box[d] = box[d];
  for (std::uint32_t d = 0; d + 1 < std::min(rank, 4U); ++d) m.strides[d] = strides[d];
  if (const Status status = fake::check_map(map, type, m, steps, interleave, swizzle)) return status;
  std::memset(map, 0, sizeof(sm90::TensorMap));
  std::memcpy(map, &m, sizeof(m));
  return fake::success;
}

// --- what the fake does not have: the library binds these for its tests and benchmarks on a GPU

#define ABSENT(symbol, ...)                                                            \
  Status symbol(__VA_ARGS__) {                                                         \
    ENTER(#symbol);                                                                    \
    return refuse(fake::not_supported, #symbol ": the fake driver has no such thing"); \
  }
ABSENT(cuStreamBeginCapture_v2, StreamHandle, int)
ABSENT(cuStreamEndCapture, StreamHandle, GraphHandle*)
ABSENT(cuGraphInstantiateWithFlags, GraphExecHandle*, GraphHandle, unsigned long long)
ABSENT(cuGraphLaunch, GraphExecHandle, StreamHandle)
ABSENT(cuGraphExecDestroy, GraphExecHandle)
ABSENT(cuGraphDestroy, GraphHandle)
ABSENT(cuEventCreate, EventHandle*, unsigned)
ABSENT(cuEventDestroy_v2, EventHandle)
ABSENT(cuEventRecord, EventHandle, StreamHandle)
ABSENT(cuEventSynchronize, EventHandle)
ABSENT(cuEventElapsedTime, float*, EventHandle, EventHandle)

}  // extern "C"
