// SPDX-License-Identifier: Apache-2.0
// A kernel loaded from a cubin, and launching it. Included by src/cuda and the GPU backends' launch code. Implements
// the contract's promise that a GPU call is asynchronous: it only enqueues.
#pragma once

#include <string>
#include <vector>

#include "cuda/driver.hpp"

namespace tessera::cuda {

inline constexpr int portable_cluster = 8;  // blocks

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
};

struct Launch {
  Dim3 grid, block;
  unsigned shared_bytes = 0;
  StreamHandle stream = nullptr;
  Dim3 cluster{};             // {1,1,1}: none
  bool programmatic = false;  // may start before the previous kernel of the stream ends (programmatic dependent launch)
};

// Context-independent (CUkernel): one object serves every context of its device. Never unloaded: launches may be in
// flight.
class LoadedKernel {
 public:
  LoadedKernel(const std::vector<char>& cubin, const char* symbol, int device);

  // Asynchronous. `params`: one pointer per kernel parameter. Allowed during stream capture (CUDA graphs).
  void launch(const Launch& launch, void** params) const;

  // Opts in to this much dynamic shared memory per block.
  void allow_shared(unsigned bytes) const;
  // And to clusters of more blocks than every GPU with clusters takes.
  void allow_large_clusters() const;

  int registers() const { return register_count; }
  int local_bytes() const { return local_size; }

 private:
  KernelHandle kernel = nullptr;
  int device;
  int register_count = 0, local_size = 0;
};

}  // namespace tessera::cuda
