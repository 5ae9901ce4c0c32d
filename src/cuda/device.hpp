// A GPU: its properties, and making it current for the duration of a call.
// Included by src/cuda and the GPU backends.
// Implements the contract's promise that a call runs on the caller's device and restores the current context.
#pragma once

#include <string>
#include <vector>

#include "cuda/driver.hpp"

namespace tessera::cuda {

// What a plan and the compiler must know of a GPU. Plans for a GPU that is not here are made from this alone.
struct Target {
  int major = 0, minor = 0;  // compute capability
  int shared_bytes = 0;      // one block's dynamic shared memory, at most
  int multiprocessors = 0;

  // What NVRTC is asked for: sm_90a on Hopper (its own instructions), sm_86, ...
  std::string architecture() const;
  bool operator==(const Target&) const = default;
};

// The target that an architecture's name means, for compiling without a GPU: "sm_80", "sm_90a". Throws Failure for a
// name that is none.
Target target_named(const std::string& architecture);

struct Properties : Target {
  DeviceHandle handle = 0;
  std::string name;
  int l2_bytes = 0;
};

int device_count();                        // 0 without a driver
const Properties& properties(int device);  // read once per device; throws for one that does not exist

// Makes a device current, and what was current before again at the end. A context of the caller's on that device is
// kept: its memory and streams are meant; otherwise it is the primary context, which the CUDA runtime and the
// frameworks share.
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
