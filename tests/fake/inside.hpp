// SPDX-License-Identifier: Apache-2.0
// What the functions of the fake driver share. Included by tests/fake/ only.
// How each of them begins, how it refuses, and what its handles stand for.
#pragma once

#include <sstream>

#include "tests/fake/machine.hpp"

namespace tessera::fake {

// Counts the call; not success where this is the one that fails.
Status enter(const char* name, bool may_fail);

template <class... Parts>
Status refuse(Status status, const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  machine().complaints.push_back(out.str());
  return status;
}

bool is_device(int device);
const Gpu& gpu(int device);
std::string architecture_of(const Gpu& gpu);

bool is_context(cuda::ContextHandle handle);
Stream* stream_of(cuda::StreamHandle handle);  // null: not one that was created
Kernel* kernel_of(const void* handle);         // null: not one that is loaded

// Null unless the bytes are all of one allocation; else where they begin in it.
Allocation* allocation_of(cuda::DevicePointer address, std::size_t bytes, std::size_t& at);

}  // namespace tessera::fake

// One call at a time, counted, with the fault that a test has ordered.
#define COUNT(name, may_fail)                                 \
  const std::lock_guard lock(tessera::fake::machine().mutex); \
  if (const tessera::fake::Status status = tessera::fake::enter(name, may_fail)) return status
#define ENTER(name)                          \
  COUNT(name, true);                         \
  if (!tessera::fake::machine().initialised) \
  return tessera::fake::refuse(tessera::fake::not_initialised, name, ": before cuInit")
