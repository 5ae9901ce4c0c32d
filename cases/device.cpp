// SPDX-License-Identifier: Apache-2.0
// Device copies of a case's buffers. Part of tessera_cases; see device.hpp. Uses the CUDA driver directly, as a caller
// of the library would, and the library's own memory on Vulkan devices.
#include "cases/device.hpp"

#include <cstring>
#include <memory>

#include "cuda/device.hpp"
#include "cuda/driver.hpp"
#include "tessera/vulkan.h"

namespace tessera::cases {
namespace {

cuda::DevicePointer pointer(void* address, std::size_t at = 0) {
  return reinterpret_cast<cuda::DevicePointer>(address) + at;
}

void wait_for_default_stream() { cuda::check(cuda::driver().stream_synchronize(nullptr), "cuStreamSynchronize"); }

}  // namespace

DeviceMemory::DeviceMemory(Device where, std::size_t bytes) : device(where), length(bytes) {
  if (device.type == DeviceType::vulkan) {
    detail::check(tessera_vulkan_allocate(device.id, bytes, &address));
    return;
  }
  if (device.type != DeviceType::cuda) {
    host.resize(bytes);
    address = host.data();
    return;
  }
  const cuda::CurrentDevice current(device.id);
  cuda::DevicePointer p = 0;
  cuda::check(cuda::driver().mem_alloc(&p, bytes > 0 ? bytes : 1), "cuMemAlloc");
  address = reinterpret_cast<void*>(p);
}

DeviceMemory::~DeviceMemory() {
  if (device.type == DeviceType::vulkan) tessera_vulkan_free(device.id, address);
  if (device.type != DeviceType::cuda || !address) return;
  const cuda::CurrentDevice current(device.id);
  cuda::driver().mem_free(pointer(address));
}

void DeviceMemory::write(const std::byte* from, std::size_t bytes, std::size_t at) const {
  if (bytes == 0) return;
  if (device.type == DeviceType::vulkan)
    return detail::check(tessera_vulkan_upload(device.id, static_cast<std::byte*>(address) + at, from, bytes));
  if (device.type != DeviceType::cuda) {
    std::memcpy(static_cast<std::byte*>(address) + at, from, bytes);
    return;
  }
  const cuda::CurrentDevice current(device.id);
  cuda::check(cuda::driver().memcpy_to_device(pointer(address, at), from, bytes, nullptr), "cuMemcpyHtoDAsync");
  wait_for_default_stream();
}

void DeviceMemory::read(std::byte* to, std::size_t bytes, std::size_t at) const {
  if (bytes == 0) return;
  if (device.type == DeviceType::vulkan)
    return detail::check(tessera_vulkan_download(device.id, to, static_cast<const std::byte*>(address) + at, bytes));
  if (device.type != DeviceType::cuda) {
    std::memcpy(to, static_cast<const std::byte*>(address) + at, bytes);
    return;
  }
  const cuda::CurrentDevice current(device.id);
  cuda::check(cuda::driver().memcpy_to_host(to, pointer(address, at), bytes, nullptr), "cuMemcpyDtoHAsync");
  wait_for_default_stream();
}

void DeviceMemory::fill(std::byte value) const {
  if (length == 0) return;
  if (device.type == DeviceType::vulkan) return write(std::vector<std::byte>(length, value).data(), length);
  if (device.type != DeviceType::cuda) {
    std::memset(address, std::to_integer<int>(value), length);
    return;
  }
  const cuda::CurrentDevice current(device.id);
  cuda::check(cuda::driver().memset_bytes(pointer(address), std::to_integer<unsigned char>(value), length, nullptr),
              "cuMemsetD8Async");
  wait_for_default_stream();
}

Placed::Placed(CaseData& source, Device where) : data(source), device(where), buffers(source.buffers()) {
  if (device.type == DeviceType::cpu || device.type == DeviceType::any) return;
  for (const Buffer* buffer : buffers) copies.push_back(std::make_unique<DeviceMemory>(device, buffer->bytes().size()));
}

void Placed::upload() {
  for (std::size_t n = 0; n < copies.size(); ++n)
    copies[n]->write(buffers[n]->bytes().data(), buffers[n]->bytes().size());
}

void Placed::download() {
  for (std::size_t n = 0; n < copies.size(); ++n)
    copies[n]->read(buffers[n]->bytes().data(), buffers[n]->bytes().size());
}

Tensor Placed::at(const Tensor& host) const {
  if (!host || copies.empty()) return host;
  Tensor t = host;
  t.device = device;
  const auto* address = static_cast<const std::byte*>(host.data);
  for (std::size_t n = 0; n < copies.size(); ++n) {
    const auto bytes = buffers[n]->bytes();
    if (bytes.empty() || address < bytes.data() || address >= bytes.data() + bytes.size()) continue;
    t.data = static_cast<std::byte*>(copies[n]->data()) + (address - bytes.data());
  }
  return t;
}

Inputs Placed::inputs() const {
  Inputs in = data.inputs();
  for (Tensor* t :
       {&in.q, &in.k, &in.v, &in.bias, &in.mask, &in.slopes, &in.sinks, &in.cu_seqlens_q, &in.cu_seqlens_k,
        &in.seqused_q, &in.seqused_k, &in.rng, &in.k_scale, &in.v_scale, &in.qv, &in.tree_mask, &in.positions})
    *t = at(*t);
  return in;
}

Outputs Placed::outputs() const { return {.o = at(data.outputs().o), .lse = at(data.outputs().lse)}; }

Saved Placed::saved() const {
  const Saved s = data.saved();
  return {.o = at(s.o), .lse = at(s.lse), .d_o = at(s.d_o), .d_lse = at(s.d_lse)};
}

Gradients Placed::gradients() const {
  const Gradients g = data.gradients();
  return {.dq = at(g.dq), .dk = at(g.dk), .dv = at(g.dv), .dbias = at(g.dbias), .dsinks = at(g.dsinks)};
}

}  // namespace tessera::cases
