// SPDX-License-Identifier: Apache-2.0
// A libcuda of CUDA 11, as far as the library looks at it: it has what older drivers have, and no libraries of kernels.
// Built as a shared library with the driver's name.
#include "cuda/driver.hpp"

using namespace tessera::cuda;

#define HAS(symbol, ...) \
  Status symbol(__VA_ARGS__) { return 0; }

extern "C" {
HAS(cuInit, unsigned)
HAS(cuDriverGetVersion, int*)
HAS(cuGetErrorName, Status, const char**)
HAS(cuGetErrorString, Status, const char**)
HAS(cuDeviceGetCount, int*)
HAS(cuDeviceGet, DeviceHandle*, int)
HAS(cuDeviceGetName, char*, int, DeviceHandle)
HAS(cuDeviceGetAttribute, int*, DeviceAttribute, DeviceHandle)
HAS(cuDevicePrimaryCtxRetain, ContextHandle*, DeviceHandle)
HAS(cuCtxGetCurrent, ContextHandle*)
HAS(cuCtxGetDevice, DeviceHandle*)
HAS(cuCtxPushCurrent_v2, ContextHandle)
HAS(cuCtxPopCurrent_v2, ContextHandle*)
}
