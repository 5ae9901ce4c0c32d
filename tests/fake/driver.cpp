// SPDX-License-Identifier: Apache-2.0
// A fake libcuda: devices, contexts, kernels; memory and the rest are in driver_memory.cpp. Built as a shared library
// with the driver's name. The rules by which it refuses are those of the CUDA driver API's documentation, for what
// Tessera uses of it. See machine.hpp.
#include <algorithm>
#include <cstring>

#include "tests/fake/compiler.hpp"
#include "tests/fake/inside.hpp"

using namespace tessera;
using namespace tessera::cuda;
using fake::machine;
using fake::refuse;

namespace tessera::fake {
namespace {

// The kernel that a text of the fake compiler describes; see cubin_of() there.
bool read_cubin(const char* code, Kernel& kernel) {
  std::istringstream in(code);
  std::string line;
  if (!std::getline(in, line) || line != cubin_mark) return false;
  std::string bytes, threads;
  for (std::string* field :
       {&kernel.architecture, &kernel.symbol, &kernel.function, &kernel.parameter_type, &bytes, &threads})
    if (!std::getline(in, *field)) return false;
  kernel.parameter_bytes = std::stoul(bytes), kernel.most_threads = std::stoi(threads);
  kernel.unit.assign(std::istreambuf_iterator<char>(in), {});
  return true;
}

Status check_launch(const Launch& l) {
  const Kernel& k = *l.kernel;
  constexpr unsigned most_grid[] = {2147483647, 65535, 65535}, most_block[] = {1024, 1024, 64};
  for (int d = 0; d < 3; ++d) {
    if (l.grid[d] < 1 || l.grid[d] > most_grid[d])
      return refuse(invalid_value, k.function, ": grid[", d, "] is ", l.grid[d]);
    if (l.block[d] < 1 || l.block[d] > most_block[d])
      return refuse(invalid_value, k.function, ": block[", d, "] is ", l.block[d]);
    if (l.cluster[d] < 1 || l.grid[d] % l.cluster[d] != 0)
      return refuse(invalid_value, k.function, ": cluster[", d, "] is ", l.cluster[d], " in a grid of ", l.grid[d]);
  }
  const unsigned blocks = l.cluster[0] * l.cluster[1] * l.cluster[2];
  if (blocks > (k.large_clusters ? 16 : 8) || (blocks > 1 && gpu(l.device).major < 9))
    return refuse(invalid_value, k.function, ": clusters of ", blocks, " blocks on ", gpu(l.device).name);
  const unsigned threads = l.block[0] * l.block[1] * l.block[2];
  if (threads > static_cast<unsigned>(k.most_threads))
    return refuse(invalid_value, k.function, ": has ", threads, " threads; it is compiled for ", k.most_threads);
  const auto allowed = k.allowed_shared.find(l.device);
  const int most_shared = std::max(48 << 10, allowed == k.allowed_shared.end() ? 0 : allowed->second);
  if (l.shared_bytes > static_cast<unsigned>(std::min(most_shared, gpu(l.device).shared_bytes)))
    return refuse(invalid_value, k.function, ": asks for ", l.shared_bytes, " bytes of shared memory; allowed are ",
                  most_shared);
  if (l.programmatic && gpu(l.device).major < 9)
    return refuse(invalid_value, k.function, ": a programmatic launch on ", gpu(l.device).name);
  return success;
}

}  // namespace
}  // namespace tessera::fake

extern "C" {

Status cuInit(unsigned) {
  COUNT("cuInit", true);
  if (machine().gpus.empty()) return fake::no_device;
  machine().initialised = true;
  return fake::success;
}

Status cuDriverGetVersion(int* version) {
  COUNT("cuDriverGetVersion", true);
  *version = machine().version;
  return fake::success;
}

// The words of a real driver for some, and for those that it does not know: nothing.
static const char* name_of(Status status) {
  return status == fake::out_of_memory     ? "CUDA_ERROR_OUT_OF_MEMORY"
         : status == fake::invalid_value   ? "CUDA_ERROR_INVALID_VALUE"
         : status == fake::not_initialised ? "CUDA_ERROR_NOT_INITIALIZED"
         : status == fake::no_device       ? "CUDA_ERROR_NO_DEVICE"
         : status == fake::invalid_image   ? "CUDA_ERROR_INVALID_IMAGE"
         : status == fake::launch_failed   ? "CUDA_ERROR_LAUNCH_FAILED"
                                           : nullptr;
}

Status cuGetErrorName(Status status, const char** text) {
  const std::lock_guard lock(machine().mutex);
  *text = name_of(status);
  return *text ? fake::success : fake::invalid_value;
}

Status cuGetErrorString(Status status, const char** text) {
  const std::lock_guard lock(machine().mutex);
  *text = name_of(status) ? "words of the fake driver" : nullptr;
  return *text ? fake::success : fake::invalid_value;
}

Status cuDeviceGetCount(int* count) {
  ENTER("cuDeviceGetCount");
  *count = static_cast<int>(machine().gpus.size());
  return fake::success;
}

Status cuDeviceGet(DeviceHandle* device, int ordinal) {
  ENTER("cuDeviceGet");
  if (!fake::is_device(ordinal)) return refuse(fake::invalid_device, "cuDeviceGet: ", ordinal);
  *device = ordinal;
  return fake::success;
}

Status cuDeviceGetName(char* name, int length, DeviceHandle device) {
  ENTER("cuDeviceGetName");
  if (!fake::is_device(device)) return refuse(fake::invalid_device, "cuDeviceGetName: ", device);
  std::strncpy(name, fake::gpu(device).name, static_cast<std::size_t>(length));
  return fake::success;
}

Status cuDeviceGetAttribute(int* value, DeviceAttribute attribute, DeviceHandle device) {
  ENTER("cuDeviceGetAttribute");
  if (!fake::is_device(device)) return refuse(fake::invalid_device, "cuDeviceGetAttribute: ", device);
  const fake::Gpu& gpu = fake::gpu(device);
  switch (attribute) {
    case DeviceAttribute::compute_capability_major:
      *value = gpu.major;
      break;
    case DeviceAttribute::compute_capability_minor:
      *value = gpu.minor;
      break;
    case DeviceAttribute::multiprocessor_count:
      *value = gpu.multiprocessors;
      break;
    case DeviceAttribute::max_shared_memory_per_block_optin:
      *value = gpu.shared_bytes;
      break;
    case DeviceAttribute::l2_cache_size:
      *value = 50 << 20;
      break;
    case DeviceAttribute::max_grid_dim_y:
      *value = 65535;
      break;
    default:
      return refuse(fake::invalid_value, "cuDeviceGetAttribute: ", static_cast<int>(attribute));
  }
  return fake::success;
}

// --- contexts

Status cuDevicePrimaryCtxRetain(ContextHandle* context, DeviceHandle device) {
  ENTER("cuDevicePrimaryCtxRetain");
  if (!fake::is_device(device)) return refuse(fake::invalid_device, "cuDevicePrimaryCtxRetain: ", device);
  *context = fake::primary_context(device);
  return fake::success;
}

Status cuCtxGetCurrent(ContextHandle* context) {
  ENTER("cuCtxGetCurrent");
  *context = fake::context_stack().empty() ? nullptr : fake::context_stack().back();
  return fake::success;
}

Status cuCtxGetDevice(DeviceHandle* device) {
  ENTER("cuCtxGetDevice");
  if (fake::context_stack().empty()) return refuse(fake::invalid_context, "cuCtxGetDevice: nothing is current");
  *device = fake::device_of(fake::context_stack().back());
  return fake::success;
}

Status cuCtxPushCurrent_v2(ContextHandle context) {
  ENTER("cuCtxPushCurrent");
  if (!fake::is_context(context)) return refuse(fake::invalid_context, "cuCtxPushCurrent: not a context");
  fake::context_stack().push_back(context);
  return fake::success;
}

// Fails only where nothing was pushed, and then there is nothing to restore.
Status cuCtxPopCurrent_v2(ContextHandle* context) {
  COUNT("cuCtxPopCurrent", false);
  if (fake::context_stack().empty()) return refuse(fake::invalid_context, "cuCtxPopCurrent: nothing is current");
  *context = fake::context_stack().back();
  fake::context_stack().pop_back();
  return fake::success;
}

// --- kernels

// A library is its one kernel.
Status cuLibraryLoadData(LibraryHandle* library, const void* code, int*, void**, unsigned, int*, void**, unsigned) {
  ENTER("cuLibraryLoadData");
  fake::Kernel kernel;
  if (!fake::read_cubin(static_cast<const char*>(code), kernel))
    return refuse(fake::invalid_image, "cuLibraryLoadData: not of the fake compiler");
  auto loaded = std::make_unique<fake::Kernel>(std::move(kernel));
  *library = reinterpret_cast<LibraryHandle>(loaded.get());
  machine().kernels[loaded.get()] = std::move(loaded);
  return fake::success;
}

Status cuLibraryUnload(LibraryHandle library) {
  COUNT("cuLibraryUnload", false);
  if (machine().kernels.erase(library) == 0) return refuse(fake::invalid_handle, "cuLibraryUnload: not a library");
  return fake::success;
}

Status cuLibraryGetKernel(KernelHandle* kernel, LibraryHandle library, const char* name) {
  ENTER("cuLibraryGetKernel");
  fake::Kernel* found = fake::kernel_of(library);
  if (!found || found->symbol != name) return refuse(fake::not_found, "cuLibraryGetKernel: no ", name);
  *kernel = reinterpret_cast<KernelHandle>(found);
  return fake::success;
}

// Loads it into the current context.
Status cuKernelGetFunction(FunctionHandle* function, KernelHandle handle) {
  ENTER("cuKernelGetFunction");
  const fake::Kernel* kernel = fake::kernel_of(handle);
  if (!kernel) return refuse(fake::invalid_handle, "cuKernelGetFunction: not a kernel");
  if (fake::context_stack().empty()) return refuse(fake::invalid_context, "cuKernelGetFunction: nothing is current");
  const int device = fake::device_of(fake::context_stack().back());
  if (kernel->architecture != fake::architecture_of(fake::gpu(device)))
    return refuse(fake::no_binary_for_gpu, kernel->function, ": is for ", kernel->architecture,
                  ", not for cuda:", device);
  *function = reinterpret_cast<FunctionHandle>(handle);
  return fake::success;
}

Status cuKernelGetAttribute(int* value, FunctionAttribute attribute, KernelHandle handle, DeviceHandle device) {
  ENTER("cuKernelGetAttribute");
  const fake::Kernel* kernel = fake::kernel_of(handle);
  if (!kernel || !fake::is_device(device)) return refuse(fake::invalid_handle, "cuKernelGetAttribute");
  *value = attribute == FunctionAttribute::max_threads_per_block ? kernel->most_threads
           : attribute == FunctionAttribute::num_regs            ? 128
                                                                 : 0;
  return fake::success;
}

Status cuKernelSetAttribute(FunctionAttribute attribute, int value, KernelHandle handle, DeviceHandle device) {
  ENTER("cuKernelSetAttribute");
  fake::Kernel* kernel = fake::kernel_of(handle);
  if (!kernel || !fake::is_device(device)) return refuse(fake::invalid_handle, "cuKernelSetAttribute");
  if (attribute == FunctionAttribute::non_portable_cluster_size_allowed && fake::gpu(device).major >= 9) {
    kernel->large_clusters = value != 0;
    return fake::success;
  }
  if (attribute != FunctionAttribute::max_dynamic_shared_size_bytes || value < 0 ||
      value > fake::gpu(device).shared_bytes)
    return refuse(fake::invalid_value, kernel->function, ": ", value, " bytes of shared memory on cuda:", device);
  kernel->allowed_shared[device] = value;
  return fake::success;
}

Status cuLaunchKernelEx(const LaunchConfig* c, FunctionHandle function, void** params, void** extra) {
  ENTER("cuLaunchKernelEx");
  fake::Launch launch{.kernel = fake::kernel_of(function), .shared_bytes = c->shared_bytes, .stream = c->stream};
  if (!launch.kernel) return refuse(fake::invalid_handle, "cuLaunchKernelEx: not a kernel");
  if (fake::context_stack().empty()) return refuse(fake::invalid_context, "cuLaunchKernelEx: nothing is current");
  launch.context = fake::context_stack().back(), launch.device = fake::device_of(launch.context);
  const fake::Stream* stream = fake::stream_of(c->stream);
  if (c->stream && (!stream || stream->context != launch.context))
    return refuse(fake::invalid_handle, launch.kernel->function, ": the stream is not of the current context");
  launch.grid[0] = c->grid_x, launch.grid[1] = c->grid_y, launch.grid[2] = c->grid_z;
  launch.block[0] = c->block_x, launch.block[1] = c->block_y, launch.block[2] = c->block_z;
  for (unsigned n = 0; n < c->attribute_count; ++n) {
    const LaunchAttribute& a = c->attributes[n];
    if (a.id == LaunchAttributeId::programmatic_stream_serialization)
      launch.programmatic = a.value.programmatic_stream_serialization_allowed != 0;
    if (a.id == LaunchAttributeId::cluster_dimension)
      launch.cluster[0] = a.value.cluster.x, launch.cluster[1] = a.value.cluster.y,
      launch.cluster[2] = a.value.cluster.z;
  }
  if (!params || !params[0] || extra) return refuse(fake::invalid_value, launch.kernel->function, ": no parameters");
  const auto* bytes = static_cast<const std::byte*>(params[0]);
  launch.parameters.assign(bytes, bytes + launch.kernel->parameter_bytes);
  if (const Status status = fake::check_launch(launch)) return status;
  machine().launches.push_back(std::move(launch));
  return fake::success;
}

}  // extern "C"
