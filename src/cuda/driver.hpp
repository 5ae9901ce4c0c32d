// SPDX-License-Identifier: Apache-2.0
// The part of the CUDA driver API that Tessera uses: declared here, so that the build needs no CUDA header, and loaded
// from libcuda.so.1 at run time (dlopen). Names, values and layouts follow the driver API's documentation. Included by
// src/cuda and by the GPU backends' launch code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tessera::cuda {

using Status = int;  // CUresult; 0 is success
using DeviceHandle = int;
using DevicePointer = std::uint64_t;
struct ContextHandleTag;
struct StreamHandleTag;
struct EventHandleTag;
struct LibraryHandleTag;
struct KernelHandleTag;
struct FunctionHandleTag;
struct GraphHandleTag;
struct GraphExecHandleTag;
using ContextHandle = ContextHandleTag*;
using StreamHandle = StreamHandleTag*;
using EventHandle = EventHandleTag*;
using LibraryHandle = LibraryHandleTag*;
using KernelHandle = KernelHandleTag*;
using FunctionHandle = FunctionHandleTag*;
using GraphHandle = GraphHandleTag*;
using GraphExecHandle = GraphExecHandleTag*;

enum class DeviceAttribute : int {
  max_shared_memory_per_block_optin = 97,
  multiprocessor_count = 16,
  compute_capability_major = 75,
  compute_capability_minor = 76,
  l2_cache_size = 38,
  max_grid_dim_y = 6,
};

enum class FunctionAttribute : int {
  max_threads_per_block = 0,
  shared_size_bytes = 1,
  local_size_bytes = 3,
  num_regs = 4,
  max_dynamic_shared_size_bytes = 8,
  non_portable_cluster_size_allowed = 14,
};

// CUlaunchAttribute: an id, padding to 8 bytes, and a value of 64 bytes.
enum class LaunchAttributeId : int { cluster_dimension = 4, programmatic_stream_serialization = 6 };
struct LaunchAttribute {
  LaunchAttributeId id;
  char padding[4];
  union {
    char bytes[64];
    struct {
      unsigned x, y, z;
    } cluster;
    int programmatic_stream_serialization_allowed;
  } value;
};
static_assert(sizeof(LaunchAttribute) == 72);

struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  StreamHandle stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

// CUDA_MEMCPY2D: rows of `width` bytes, `pitch` bytes apart, of the host or of a device.
struct Copy2D {
  static constexpr unsigned host = 1, device = 2;
  std::size_t from_x, from_y;
  unsigned from_type;
  const void* from_host;
  DevicePointer from_device;
  void* from_array;
  std::size_t from_pitch, to_x, to_y;
  unsigned to_type;
  void* to_host;
  DevicePointer to_device;
  void* to_array;
  std::size_t to_pitch, width, height;
};
static_assert(sizeof(Copy2D) == 128);

// One row per function: our name, the driver's symbol, the parameters. All return a Status.
#define TESSERA_CUDA_DRIVER(X)                                                                                         \
  X(init, "cuInit", (unsigned flags))                                                                                  \
  X(driver_get_version, "cuDriverGetVersion", (int* version))                                                          \
  X(get_error_name, "cuGetErrorName", (Status status, const char** text))                                              \
  X(get_error_string, "cuGetErrorString", (Status status, const char** text))                                          \
  X(device_get_count, "cuDeviceGetCount", (int* count))                                                                \
  X(device_get, "cuDeviceGet", (DeviceHandle * device, int ordinal))                                                   \
  X(device_get_name, "cuDeviceGetName", (char* name, int length, DeviceHandle device))                                 \
  X(device_get_attribute, "cuDeviceGetAttribute", (int* value, DeviceAttribute attribute, DeviceHandle device))        \
  X(device_primary_ctx_retain, "cuDevicePrimaryCtxRetain", (ContextHandle * context, DeviceHandle device))             \
  X(ctx_get_current, "cuCtxGetCurrent", (ContextHandle * context))                                                     \
  X(ctx_get_device, "cuCtxGetDevice", (DeviceHandle * device))                                                         \
  X(ctx_push_current, "cuCtxPushCurrent_v2", (ContextHandle context))                                                  \
  X(ctx_pop_current, "cuCtxPopCurrent_v2", (ContextHandle * context))                                                  \
  X(library_load_data, "cuLibraryLoadData",                                                                            \
    (LibraryHandle * library, const void* code, int* jit_options, void** jit_values, unsigned jit_count,               \
     int* library_options, void** library_values, unsigned library_count))                                             \
  X(library_unload, "cuLibraryUnload", (LibraryHandle library))                                                        \
  X(library_get_kernel, "cuLibraryGetKernel", (KernelHandle * kernel, LibraryHandle library, const char* name))        \
  X(kernel_get_function, "cuKernelGetFunction", (FunctionHandle * function, KernelHandle kernel))                      \
  X(kernel_get_attribute, "cuKernelGetAttribute",                                                                      \
    (int* value, FunctionAttribute attribute, KernelHandle kernel, DeviceHandle device))                               \
  X(kernel_set_attribute, "cuKernelSetAttribute",                                                                      \
    (FunctionAttribute attribute, int value, KernelHandle kernel, DeviceHandle device))                                \
  X(launch_kernel_ex, "cuLaunchKernelEx",                                                                              \
    (const LaunchConfig* config, FunctionHandle function, void** params, void** extra))                                \
  X(mem_alloc, "cuMemAlloc_v2", (DevicePointer * pointer, std::size_t bytes))                                          \
  X(mem_free, "cuMemFree_v2", (DevicePointer pointer))                                                                 \
  X(memcpy_to_device, "cuMemcpyHtoDAsync_v2",                                                                          \
    (DevicePointer to, const void* from, std::size_t bytes, StreamHandle stream))                                      \
  X(memcpy_to_host, "cuMemcpyDtoHAsync_v2", (void* to, DevicePointer from, std::size_t bytes, StreamHandle stream))    \
  X(memcpy_rows, "cuMemcpy2DAsync_v2", (const Copy2D* copy, StreamHandle stream))                                      \
  X(memset_bytes, "cuMemsetD8Async", (DevicePointer to, unsigned char value, std::size_t bytes, StreamHandle stream))  \
  X(stream_create, "cuStreamCreate", (StreamHandle * stream, unsigned flags))                                          \
  X(stream_destroy, "cuStreamDestroy_v2", (StreamHandle stream))                                                       \
  X(stream_synchronize, "cuStreamSynchronize", (StreamHandle stream))                                                  \
  X(stream_query, "cuStreamQuery", (StreamHandle stream))                                                              \
  X(stream_begin_capture, "cuStreamBeginCapture_v2", (StreamHandle stream, int mode))                                  \
  X(stream_end_capture, "cuStreamEndCapture", (StreamHandle stream, GraphHandle * graph))                              \
  X(graph_instantiate, "cuGraphInstantiateWithFlags",                                                                  \
    (GraphExecHandle * exec, GraphHandle graph, unsigned long long flags))                                             \
  X(graph_launch, "cuGraphLaunch", (GraphExecHandle exec, StreamHandle stream))                                        \
  X(graph_exec_destroy, "cuGraphExecDestroy", (GraphExecHandle exec))                                                  \
  X(graph_destroy, "cuGraphDestroy", (GraphHandle graph))                                                              \
  X(event_create, "cuEventCreate", (EventHandle * event, unsigned flags))                                              \
  X(event_destroy, "cuEventDestroy_v2", (EventHandle event))                                                           \
  X(event_record, "cuEventRecord", (EventHandle event, StreamHandle stream))                                           \
  X(event_synchronize, "cuEventSynchronize", (EventHandle event))                                                      \
  X(event_elapsed, "cuEventElapsedTime", (float* milliseconds, EventHandle from, EventHandle to))                      \
  X(tensor_map_encode_tiled, "cuTensorMapEncodeTiled",                                                                 \
    (void* map, int type, std::uint32_t rank, void* address, const std::uint64_t* shape, const std::uint64_t* strides, \
     const std::uint32_t* box, const std::uint32_t* element_strides, int interleave, int swizzle, int l2_promotion,    \
     int out_of_bounds))

struct Driver {
#define X(name, symbol, parameters) Status(*name) parameters = nullptr;
  TESSERA_CUDA_DRIVER(X)
#undef X
};

// The driver, loaded and initialised on first use, or the reason why there is none. Either is cached for the process.
struct DriverOrReason {
  const Driver* driver;
  std::string reason;
  int devices = 0;
};
const DriverOrReason& find_driver();

// Throws Failure (TESSERA_DEVICE_ERROR) with that reason.
const Driver& driver();

// Throws Failure with the call's name and the driver's error string, unless the status is success.
void check(Status status, const char* call);

}  // namespace tessera::cuda
