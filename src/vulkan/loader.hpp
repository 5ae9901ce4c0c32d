// SPDX-License-Identifier: Apache-2.0
// Vulkan's functions, found at run time: libvulkan.so.1 is opened by dlopen, as the CUDA driver is, so the library
// needs no loader to be linked. Vulkan's headers give types alone. Included by src/vulkan only.
#pragma once

#define VK_NO_PROTOTYPES
#include <vulkan/vulkan.h>

#include <string>

namespace tessera::vulkan {

// Functions of an instance and of its physical devices, and of a device. X(name without vk).
#define TESSERA_VULKAN_INSTANCE(X)          \
  X(EnumeratePhysicalDevices)               \
  X(GetPhysicalDeviceProperties2)           \
  X(GetPhysicalDeviceFeatures2)             \
  X(GetPhysicalDeviceMemoryProperties)      \
  X(GetPhysicalDeviceQueueFamilyProperties) \
  X(EnumerateDeviceExtensionProperties)     \
  X(CreateDevice)                           \
  X(GetDeviceProcAddr)
#define TESSERA_VULKAN_DEVICE(X) \
  X(GetDeviceQueue)              \
  X(CreateBuffer)                \
  X(DestroyBuffer)               \
  X(GetBufferMemoryRequirements) \
  X(AllocateMemory)              \
  X(FreeMemory)                  \
  X(BindBufferMemory)            \
  X(MapMemory)                   \
  X(GetBufferDeviceAddress)      \
  X(CreateShaderModule)          \
  X(DestroyShaderModule)         \
  X(CreatePipelineLayout)        \
  X(DestroyPipelineLayout)       \
  X(CreatePipelineCache)         \
  X(GetPipelineCacheData)        \
  X(DestroyPipelineCache)        \
  X(CreateComputePipelines)      \
  X(DestroyPipeline)             \
  X(CreateCommandPool)           \
  X(DestroyCommandPool)          \
  X(ResetCommandPool)            \
  X(AllocateCommandBuffers)      \
  X(BeginCommandBuffer)          \
  X(EndCommandBuffer)            \
  X(CmdBindPipeline)             \
  X(CmdPushConstants)            \
  X(CmdDispatch)                 \
  X(CmdPipelineBarrier)          \
  X(CmdCopyBuffer)               \
  X(CreateFence)                 \
  X(DestroyFence)                \
  X(ResetFences)                 \
  X(GetFenceStatus)              \
  X(WaitForFences)               \
  X(QueueSubmit)

struct InstanceFunctions {
#define X(name) PFN_vk##name name = nullptr;
  TESSERA_VULKAN_INSTANCE(X)
#undef X
  PFN_vkVoidFunction list_matrix_shapes = nullptr;  // of VK_KHR_cooperative_matrix, which not every driver has
};
struct DeviceFunctions {
#define X(name) PFN_vk##name name = nullptr;
  TESSERA_VULKAN_DEVICE(X)
#undef X
};

// The library's own instance, or why there is none. The loader is there if get_proc is.
struct Loader {
  PFN_vkGetInstanceProcAddr get_proc = nullptr;
  VkInstance instance = VK_NULL_HANDLE;
  std::string reason;
};

// Opened once per process. In a forked child nothing of it works: `reason` says so.
const Loader& find_loader();

// They throw Failure where a function is missing.
InstanceFunctions instance_functions(VkInstance instance);
DeviceFunctions device_functions(const InstanceFunctions& functions, VkDevice device);

// One of Vulkan's structs, zero but for its type and what it is continued by.
template <class Struct>
Struct of_type(VkStructureType type, void* next = nullptr) {
  Struct made{};
  made.sType = type, made.pNext = next;
  return made;
}

// Throws Failure, with the call's name and the driver's report, unless the result is VK_SUCCESS.
void check(VkResult result, const char* call);

}  // namespace tessera::vulkan
