// SPDX-License-Identifier: Apache-2.0
// A GPU: its properties, and a scope guard that makes its context current for the duration of a call. Included by
// src/cuda and the GPU backends. Implements the contract's promise that a call runs on the caller's device and restores
// the current context.
#pragma once

#include <string>
#include <vector>

#include "cuda/driver.hpp"

namespace tessera::cuda {

// The properties that planning and compiling depend on. They suffice to cross-compile: to plan and compile for a GPU
// that this machine does not have.
struct Target {
  int major = 0, minor = 0;  // compute capability
  int shared_bytes = 0;      // opt-in maximum of dynamic shared memory per block
  int multiprocessors = 0;
  int l2_bytes = 0;

  // NVRTC's --gpu-architecture: sm_90a on Hopper (architecture-specific instructions such as wgmma), sm_86, ...
  std::string architecture() const;
  bool operator==(const Target&) const = default;
};

// The target that an architecture's name means, for compiling without a GPU: "sm_80", "sm_90a". Throws Failure for a
// name that is none.
Target target_named(const std::string& architecture);

struct Properties : Target {
  DeviceHandle handle = 0;
  std::string name;
};

int device_count();                        // 0 without a driver
const Properties& properties(int device);  // read once per device; throws for one that does not exist

// Scope guard: makes a device's context current and restores the previous one at the end. If the caller's current
// context is on that device it stays current, because pointers and streams belong to it. Otherwise the primary context
// is used, which the CUDA runtime and the frameworks share.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  bool pushed = false;
};

}  // namespace tessera::cuda
