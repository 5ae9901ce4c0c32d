// SPDX-License-Identifier: Apache-2.0
// A machine with GPUs that are not there: the state behind the fake libcuda (tests/fake/driver.cpp), which tests read
// and steer. Nothing is computed. Device memory is addresses that the host cannot touch, kernels are descriptions made
// by the fake NVRTC, and a launch is a record. What a real driver would refuse is refused, and noted as a complaint.
// Included by tests/fake/. Implements docs/testing.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/driver.hpp"
#include "sm90/params.hpp"

namespace tessera::fake {

using cuda::Status;
inline constexpr Status success = 0, invalid_value = 1, out_of_memory = 2, not_initialised = 3, no_device = 100,
                        invalid_device = 101, invalid_image = 200, invalid_context = 201, no_binary_for_gpu = 209,
                        invalid_handle = 400, not_found = 500, not_ready = 600, launch_failed = 719,
                        not_supported = 801;

struct Gpu {
  const char* name;
  int major, minor, multiprocessors, shared_bytes;  // the last: of a block that asks for it
};
inline constexpr Gpu turing{"Fake T4", 7, 5, 40, 64 << 10}, ampere{"Fake A100", 8, 0, 108, 163 << 10},
    ampere_86{"Fake A40", 8, 6, 84, 99 << 10}, ada{"Fake L40", 8, 9, 142, 99 << 10},
    hopper{"Fake H100", 9, 0, 132, 227 << 10}, blackwell{"Fake B200", 10, 0, 148, 227 << 10},
    blackwell_120{"Fake RTX 5090", 12, 0, 170, 99 << 10};

// What the fake compiler says of a unit, and a loaded copy of it.
struct Kernel {
  std::string architecture, symbol, function, parameter_type, unit;
  std::size_t parameter_bytes = 0;
  int most_threads = 1024;
  std::map<int, int> allowed_shared{};  // by device
  bool large_clusters = false;          // of more than 8 blocks, where the GPU has them
};

struct Launch {
  const Kernel* kernel = nullptr;
  unsigned grid[3]{}, block[3]{}, cluster[3]{1, 1, 1};
  unsigned shared_bytes = 0;
  bool programmatic = false;
  int device = 0;
  cuda::ContextHandle context = nullptr;
  cuda::StreamHandle stream = nullptr;
  std::vector<std::byte> parameters{};
};

// The arguments of cuTensorMapEncodeTiled, which a fake tensor map holds instead of the hardware's bits.
struct EncodedMap {
  std::uint64_t address;
  std::uint64_t shape[4], strides[3];  // as the driver is given them
  std::uint32_t box[4];
  int type, rank;
};
static_assert(sizeof(EncodedMap) <= sizeof(sm90::TensorMap));

struct Allocation {
  int device = 0;
  std::size_t bytes = 0, reserved = 0;
  std::vector<std::byte> content{};  // empty until somebody writes
};

struct Stream {
  cuda::ContextHandle context;
};

// The n-th call from now fails (0: none does), and all later ones if it stays: an error of a kernel does.
struct Fault {
  int in = 0;
  Status status = launch_failed;
  bool stays = false;
  bool happened = false;
  const char* call = nullptr;  // that failed first
};

struct Machine {
  std::mutex mutex;
  std::vector<Gpu> gpus{turing, ampere, ampere_86, ada, hopper, blackwell, blackwell_120};
  int version = 13000;
  bool initialised = false;
  Fault fault;

  std::vector<const char*> calls;  // of the driver, by name
  std::vector<Launch> launches;
  std::vector<std::string> complaints;
  std::map<std::uintptr_t, Allocation> allocations;        // by address
  std::map<const void*, std::unique_ptr<Kernel>> kernels;  // by handle
  std::list<Stream> streams;
  bool (*busy)(cuda::StreamHandle stream) = nullptr;  // who may have work on streams: the fake NCCL. Null: nobody

  // The allocation that holds this address, or null; its beginning in `begin`.
  const Allocation* find(std::uintptr_t address, std::uintptr_t& begin) const;
  int device_of(int major, int minor) const;

  // Forgets calls, launches, complaints and the fault.
  void forget();
};

Machine& machine();

// Of the calling thread, the current one last.
std::vector<cuda::ContextHandle>& context_stack();
// One that is not the device's primary one.
cuda::ContextHandle make_context(int device);
cuda::ContextHandle primary_context(int device);
int device_of(cuda::ContextHandle context);

}  // namespace tessera::fake
