// SPDX-License-Identifier: Apache-2.0
// Loading and launching kernels; see module.hpp.
#include "cuda/module.hpp"

#include "cuda/device.hpp"

namespace tessera::cuda {

LoadedKernel::LoadedKernel(const std::vector<char>& cubin, const char* symbol, int device) : device(device) {
  const Driver& d = driver();
  const CurrentDevice current(device);
  LibraryHandle library = nullptr;
  check(d.library_load_data(&library, cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0), "cuLibraryLoadData");
  // On failure the library is unloaded: the next call loads it again.
  struct Guard {
    const Driver& driver;
    LibraryHandle library;
    ~Guard() {
      if (library) driver.library_unload(library);
    }
  } guard{d, library};
  check(d.library_get_kernel(&kernel, library, symbol), "cuLibraryGetKernel");
  // Forces loading now. CUDA loads lazily otherwise, at the first launch, which may be inside a stream capture.
  FunctionHandle function = nullptr;
  check(d.kernel_get_function(&function, kernel), "cuKernelGetFunction");
  const DeviceHandle handle = properties(device).handle;
  check(d.kernel_get_attribute(&register_count, FunctionAttribute::num_regs, kernel, handle), "cuKernelGetAttribute");
  check(d.kernel_get_attribute(&local_size, FunctionAttribute::local_size_bytes, kernel, handle),
        "cuKernelGetAttribute");
  guard.library = nullptr;
}

void LoadedKernel::allow_shared(unsigned bytes) const {
  check(driver().kernel_set_attribute(FunctionAttribute::max_dynamic_shared_size_bytes, static_cast<int>(bytes), kernel,
                                      properties(device).handle),
        "cuKernelSetAttribute");
}

void LoadedKernel::allow_large_clusters() const {
  check(driver().kernel_set_attribute(FunctionAttribute::non_portable_cluster_size_allowed, 1, kernel,
                                      properties(device).handle),
        "cuKernelSetAttribute");
}

void LoadedKernel::launch(const Launch& launch, void** params) const {
  LaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (launch.cluster.x * launch.cluster.y * launch.cluster.z > 1) {
    attributes[count].id = LaunchAttributeId::cluster_dimension;
    attributes[count++].value.cluster = {launch.cluster.x, launch.cluster.y, launch.cluster.z};
  }
  if (launch.programmatic) {
    attributes[count].id = LaunchAttributeId::programmatic_stream_serialization;
    attributes[count++].value.programmatic_stream_serialization_allowed = 1;
  }
  const LaunchConfig config{.grid_x = launch.grid.x,
                            .grid_y = launch.grid.y,
                            .grid_z = launch.grid.z,
                            .block_x = launch.block.x,
                            .block_y = launch.block.y,
                            .block_z = launch.block.z,
                            .shared_bytes = launch.shared_bytes,
                            .stream = launch.stream,
                            .attributes = attributes,
                            .attribute_count = count};
  // cuLaunchKernelEx also accepts a CUkernel, which means its function in the current context.
  check(driver().launch_kernel_ex(&config, reinterpret_cast<FunctionHandle>(kernel), params, nullptr),
        "cuLaunchKernelEx");
}

}  // namespace tessera::cuda
