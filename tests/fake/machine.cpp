// SPDX-License-Identifier: Apache-2.0
// The state of the fake machine, and what the fake driver's functions share; see machine.hpp and inside.hpp.
#include <algorithm>

#include "tests/fake/inside.hpp"

namespace tessera::fake {
namespace {

struct Context {
  int device;
  bool primary;
};

// Never removed: tests are short.
std::list<Context>& contexts() {
  static std::list<Context> all;
  return all;
}

cuda::ContextHandle handle_of(Context& context) { return reinterpret_cast<cuda::ContextHandle>(&context); }

const Context* context_of(cuda::ContextHandle handle) {
  for (Context& context : contexts())
    if (handle_of(context) == handle) return &context;
  return nullptr;
}

}  // namespace

Machine& machine() {
  static Machine only;
  return only;
}

const Allocation* Machine::find(std::uintptr_t address, std::uintptr_t& begin) const {
  auto next = allocations.upper_bound(address);
  if (next == allocations.begin()) return nullptr;
  --next;
  begin = next->first;
  return address < begin + next->second.bytes ? &next->second : nullptr;
}

int Machine::device_of(int major, int minor) const {
  for (std::size_t n = 0; n < gpus.size(); ++n)
    if (gpus[n].major == major && gpus[n].minor == minor) return static_cast<int>(n);
  return -1;
}

void Machine::forget() {
  calls.clear(), launches.clear(), complaints.clear();
  fault = {};
}

// --- contexts

std::vector<cuda::ContextHandle>& context_stack() {
  thread_local std::vector<cuda::ContextHandle> stack;
  return stack;
}

cuda::ContextHandle make_context(int device) {
  contexts().push_back({device, false});
  return handle_of(contexts().back());
}

cuda::ContextHandle primary_context(int device) {
  for (Context& context : contexts())
    if (context.primary && context.device == device) return handle_of(context);
  contexts().push_back({device, true});
  return handle_of(contexts().back());
}

int device_of(cuda::ContextHandle handle) {
  const Context* context = context_of(handle);
  return context ? context->device : -1;
}

bool is_context(cuda::ContextHandle handle) { return context_of(handle) != nullptr; }

// --- inside

Status enter(const char* name, bool may_fail) {
  machine().calls.push_back(name);
  Fault& fault = machine().fault;
  if (!may_fail) return success;
  const bool now = fault.in > 0 && --fault.in == 0, still = fault.happened && fault.stays;
  if (!now && !still) return success;
  if (!fault.happened) fault.call = name;
  fault.happened = true;
  return fault.status;
}

bool is_device(int device) { return device >= 0 && device < static_cast<int>(machine().gpus.size()); }

const Gpu& gpu(int device) { return machine().gpus[static_cast<std::size_t>(device)]; }

std::string architecture_of(const Gpu& gpu) {
  return "sm_" + std::to_string(gpu.major) + std::to_string(gpu.minor) + (gpu.major >= 9 ? "a" : "");
}

Kernel* kernel_of(const void* handle) {
  const auto found = machine().kernels.find(handle);
  return found == machine().kernels.end() ? nullptr : found->second.get();
}

Allocation* allocation_of(cuda::DevicePointer address, std::size_t bytes, std::size_t& at) {
  std::uintptr_t begin = 0;
  auto* found = const_cast<Allocation*>(machine().find(address, begin));
  if (!found) return nullptr;
  at = address - begin;
  return bytes <= found->bytes - at ? found : nullptr;
}

}  // namespace tessera::fake
