// SPDX-License-Identifier: Apache-2.0
// Opens libvulkan.so.1 and finds its functions; see loader.hpp.
#include "vulkan/loader.hpp"

#include "core/environment.hpp"
#include "core/failure.hpp"
#include "core/fork.hpp"
#include "core/once.hpp"
#include "cuda/library.hpp"

namespace tessera::vulkan {
namespace {

std::string name_of(VkResult result) {
  switch (result) {
#define X(name) \
  case name:    \
    return #name;
    X(VK_ERROR_OUT_OF_HOST_MEMORY)
    X(VK_ERROR_OUT_OF_DEVICE_MEMORY)
    X(VK_ERROR_INITIALIZATION_FAILED)
    X(VK_ERROR_DEVICE_LOST)
    X(VK_ERROR_LAYER_NOT_PRESENT)
    X(VK_ERROR_EXTENSION_NOT_PRESENT)
    X(VK_ERROR_FEATURE_NOT_PRESENT)
    X(VK_ERROR_INCOMPATIBLE_DRIVER)
    X(VK_ERROR_TOO_MANY_OBJECTS)
    X(VK_ERROR_FRAGMENTED_POOL)
    X(VK_ERROR_INVALID_OPAQUE_CAPTURE_ADDRESS)
    X(VK_TIMEOUT)
#undef X
    default:
      return text("VkResult ", static_cast<int>(result));
  }
}

Loader missing(std::string reason) { return {nullptr, VK_NULL_HANDLE, std::move(reason)}; }

Loader open_loader() {
  const char* wanted = environment("TESSERA_VULKAN");
  const std::string name = wanted && *wanted ? wanted : "libvulkan.so.1";
  const cuda::SharedLibrary library({name});
  if (!library.is_open())
    return missing(text("there is no Vulkan: ", name, " could not be opened (", library.error(), ")"));
  Loader loader;
  loader.get_proc = reinterpret_cast<PFN_vkGetInstanceProcAddr>(library.symbol("vkGetInstanceProcAddr"));
  const auto create = loader.get_proc
                          ? reinterpret_cast<PFN_vkCreateInstance>(loader.get_proc(VK_NULL_HANDLE, "vkCreateInstance"))
                          : nullptr;
  if (!create) return missing(text(name, " is no Vulkan loader: it has no vkCreateInstance"));
  auto application = of_type<VkApplicationInfo>(VK_STRUCTURE_TYPE_APPLICATION_INFO);
  application.pEngineName = "tessera", application.apiVersion = VK_API_VERSION_1_2;
  auto info = of_type<VkInstanceCreateInfo>(VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO);
  info.pApplicationInfo = &application;
  const VkResult result = create(&info, nullptr, &loader.instance);
  if (result == VK_ERROR_OUT_OF_HOST_MEMORY) throw std::bad_alloc();
  if (result != VK_SUCCESS)
    loader.reason = text("Vulkan does not start: vkCreateInstance says ", name_of(result), "; is there a driver?");
  return loader;
}

struct Opened {
  Loader found = open_loader();
  Loader lost = missing(
      "this process was forked after Vulkan had been started, which then does not work in it; start a new process "
      "instead (in Python: the start method \"spawn\")");
  unsigned forks = fork_count();
};

}  // namespace

const Loader& find_loader() {
  static constinit Once<const Opened> opened;
  const Opened& here = opened.get([] { return Opened(); });
  return here.found.instance && here.forks != fork_count() ? here.lost : here.found;
}

InstanceFunctions instance_functions(VkInstance instance) {
  InstanceFunctions table;
  const PFN_vkGetInstanceProcAddr get = find_loader().get_proc;
  if (!get) throw Failure(TESSERA_DEVICE_ERROR, find_loader().reason);
#define X(name)                                                           \
  table.name = reinterpret_cast<PFN_vk##name>(get(instance, "vk" #name)); \
  if (!table.name) throw Failure(TESSERA_DEVICE_ERROR, "the Vulkan instance has no vk" #name "; 1.2 is needed");
  TESSERA_VULKAN_INSTANCE(X)
#undef X
  table.list_matrix_shapes = get(instance, "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR");
  return table;
}

DeviceFunctions device_functions(const InstanceFunctions& functions, VkDevice device) {
  DeviceFunctions table;
#define X(name)                                                                                 \
  table.name = reinterpret_cast<PFN_vk##name>(functions.GetDeviceProcAddr(device, "vk" #name)); \
  if (!table.name) throw Failure(TESSERA_DEVICE_ERROR, "the Vulkan device has no vk" #name "; 1.2 is needed");
  TESSERA_VULKAN_DEVICE(X)
#undef X
  return table;
}

void check(VkResult result, const char* call) {
  if (result == VK_SUCCESS) return;
  const bool memory = result == VK_ERROR_OUT_OF_HOST_MEMORY || result == VK_ERROR_OUT_OF_DEVICE_MEMORY;
  throw Failure(memory ? TESSERA_OUT_OF_MEMORY : TESSERA_DEVICE_ERROR, text(call, " failed: ", name_of(result)));
}

}  // namespace tessera::vulkan
