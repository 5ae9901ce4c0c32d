// SPDX-License-Identifier: Apache-2.0
// Device copies of a case's buffers: the same bytes, guard zones and gaps included, so that GPU results get the same
// checks as CPU results. On the CPU nothing is copied. Included by cases/run.cpp and GPU tests; uses src/cuda's driver,
// which knows nothing of attention.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "cases/buffer.hpp"
#include "cases/case.hpp"
#include "tessera/types.hpp"

namespace tessera::cases {

// Memory of one device; on the CPU it is a vector.
class DeviceMemory {
 public:
  DeviceMemory(Device device, std::size_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  void* data() const { return address; }
  std::size_t size() const { return length; }
  // `at` is an offset in bytes. Copies run on the default stream and are complete on return. A stream that does not
  // synchronise with the default stream (non-blocking) must have been synchronised before.
  void write(const std::byte* from, std::size_t bytes, std::size_t at = 0) const;
  void read(std::byte* to, std::size_t bytes, std::size_t at = 0) const;
  void fill(std::byte value) const;

 private:
  Device device;
  std::size_t length;
  void* address = nullptr;
  std::vector<std::byte> host;
};

// The tensors of a case on the call's device. Between upload() and download() the device copies are the valid ones.
class Placed {
 public:
  Placed(CaseData& data, Device device);

  void upload();
  void download();

  Inputs inputs() const;
  Outputs outputs() const;
  Saved saved() const;
  Gradients gradients() const;
  Tensor at(const Tensor& host) const;  // the same view on the device

 private:
  CaseData& data;
  Device device;
  std::vector<Buffer*> buffers;
  std::vector<std::unique_ptr<DeviceMemory>> copies;  // one per buffer; empty on the CPU
};

}  // namespace tessera::cases
