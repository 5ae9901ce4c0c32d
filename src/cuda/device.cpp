// SPDX-License-Identifier: Apache-2.0
// Properties and contexts of GPUs; see device.hpp.
#include "cuda/device.hpp"

#include <atomic>

#include "core/failure.hpp"
#include "core/once.hpp"

namespace tessera::cuda {

std::string Target::architecture() const { return text("sm_", major, minor, major >= 9 ? "a" : ""); }

Target target_named(const std::string& name) {
  // Shared memory per block from the CUDA programming guide's table of compute capabilities; multiprocessors and L2
  // cache of each generation's largest chip.
  static constexpr Target known[] = {
      {7, 5, 64 << 10, 72, 6 << 20},      {8, 0, 163 << 10, 108, 40 << 20},   {8, 6, 99 << 10, 84, 6 << 20},
      {8, 7, 163 << 10, 16, 4 << 20},     {8, 9, 99 << 10, 142, 96 << 20},    {9, 0, 227 << 10, 132, 60 << 20},
      {10, 0, 227 << 10, 148, 126 << 20}, {10, 3, 227 << 10, 160, 126 << 20}, {11, 0, 227 << 10, 20, 32 << 20},
      {12, 0, 99 << 10, 170, 96 << 20},   {12, 1, 99 << 10, 48, 24 << 20}};
  std::string names;
  for (const Target& target : known) {
    if (target.architecture() == name) return target;
    names += text(names.empty() ? "" : ", ", target.architecture());
  }
  invalid("architecture: is '", name, "'; must be one of ", names);
}

int device_count() { return find_driver().devices; }

static int attribute(DeviceHandle device, DeviceAttribute which) {
  int value = 0;
  check(driver().device_get_attribute(&value, which, device), "cuDeviceGetAttribute");
  return value;
}

static Properties read_properties(int device) {
  Properties p;
  check(driver().device_get(&p.handle, device), "cuDeviceGet");
  char name[256] = {};
  check(driver().device_get_name(name, sizeof(name), p.handle), "cuDeviceGetName");
  p.name = name;
  p.major = attribute(p.handle, DeviceAttribute::compute_capability_major);
  p.minor = attribute(p.handle, DeviceAttribute::compute_capability_minor);
  p.multiprocessors = attribute(p.handle, DeviceAttribute::multiprocessor_count);
  p.shared_bytes = attribute(p.handle, DeviceAttribute::max_shared_memory_per_block_optin);
  p.l2_bytes = attribute(p.handle, DeviceAttribute::l2_cache_size);
  return p;
}

static std::vector<Properties> read_all_properties() {
  std::vector<Properties> all;
  const int count = device_count();
  for (int i = 0; i < count; ++i) all.push_back(read_properties(i));
  return all;
}

static const std::vector<Properties>& all_properties() {
  (void)driver();  // says why, if there is none
  static constinit Once<const std::vector<Properties>> all;
  return all.get(read_all_properties);
}

const Properties& properties(int device) {
  const std::vector<Properties>& known = all_properties();
  const auto count = static_cast<int>(known.size());
  if (device < 0 || device >= count)
    invalid("device: is cuda:", device, " but this machine has ", count, count == 1 ? " GPU" : " GPUs");
  return known[static_cast<std::size_t>(device)];
}

// The primary context, cached per device. Threads that race may retain it more than once, which is harmless. It is
// never released: other users of the process need it too.
static ContextHandle primary_context(int device) {
  const Properties& p = properties(device);
  using Contexts = std::vector<std::atomic<ContextHandle>>;
  static constinit Once<Contexts> contexts;
  auto& known = contexts.get([] { return Contexts(all_properties().size()); })[static_cast<std::size_t>(device)];
  ContextHandle context = known;
  if (!context) check(driver().device_primary_ctx_retain(&context, p.handle), "cuDevicePrimaryCtxRetain");
  known = context;
  return context;
}

CurrentDevice::CurrentDevice(int device) {
  const Driver& d = driver();
  const DeviceHandle wanted = properties(device).handle;
  ContextHandle current = nullptr;
  check(d.ctx_get_current(&current), "cuCtxGetCurrent");
  DeviceHandle here = -1;
  if (current) check(d.ctx_get_device(&here), "cuCtxGetDevice");
  if (here == wanted) return;
  check(d.ctx_push_current(primary_context(device)), "cuCtxPushCurrent");
  pushed = true;
}

CurrentDevice::~CurrentDevice() {
  ContextHandle ours = nullptr;
  if (pushed) driver().ctx_pop_current(&ours);
}

}  // namespace tessera::cuda
