// SPDX-License-Identifier: Apache-2.0
// The fake libvulkan.so.1; see fake_vulkan.hpp.
#include "tests/vulkan/fake_vulkan.hpp"

#define VK_NO_PROTOTYPES
#include <vulkan/vulkan.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>

namespace tessera::test {
namespace {

FakeVulkan state;

VkResult done() { return ++state.calls == state.fail_at ? static_cast<VkResult>(state.fail_with) : VK_SUCCESS; }

// A call that makes an object: a number of its own, unless it fails.
template <class Handle>
VkResult make(Handle* out) {
  static std::uintptr_t next = 0x1000;
  if (const VkResult result = done(); result != VK_SUCCESS) return result;
  ++state.alive;
  *out = reinterpret_cast<Handle>(next += 16);
  return VK_SUCCESS;
}

VkResult VKAPI_CALL create_instance(const VkInstanceCreateInfo*, const VkAllocationCallbacks*, VkInstance* out) {
  *out = reinterpret_cast<VkInstance>(std::uintptr_t{0x10});
  return state.starts ? VK_SUCCESS : VK_ERROR_INCOMPATIBLE_DRIVER;
}
VkResult VKAPI_CALL enumerate(VkInstance, std::uint32_t* count, VkPhysicalDevice* out) {
  *count = static_cast<std::uint32_t>(state.devices);
  for (std::uintptr_t n = 0; out && n < *count; ++n) out[n] = reinterpret_cast<VkPhysicalDevice>(0x20 + n);
  return VK_SUCCESS;
}
// The struct of a chain that has the type; null: none has.
template <class Struct>
Struct* in_chain(void* chain, int type) {
  for (auto* s = static_cast<VkBaseOutStructure*>(chain); s; s = s->pNext)
    if (s->sType == static_cast<VkStructureType>(type)) return reinterpret_cast<Struct*>(s);
  return nullptr;
}
VkBool32 has(const char* name) { return std::strcmp(state.missing, name) != 0; }

void VKAPI_CALL properties(VkPhysicalDevice, VkPhysicalDeviceProperties2* out) {
  std::strcpy(out->properties.deviceName, "a fake");
  out->properties.apiVersion = has("1.2") ? VK_API_VERSION_1_3 : VK_API_VERSION_1_1;
  out->properties.limits.maxComputeSharedMemorySize = has("shared") ? 32768 : 16384;
  out->properties.limits.maxComputeWorkGroupInvocations = 1024;
  out->properties.limits.maxComputeWorkGroupSize[0] = state.widest;
  out->properties.driverVersion = state.driver_version;
  if (auto* s =
          in_chain<VkPhysicalDeviceDriverProperties>(out->pNext, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_DRIVER_PROPERTIES))
    s->driverID = static_cast<VkDriverId>(state.driver);
  if (auto* s = in_chain<VkPhysicalDeviceSubgroupProperties>(out->pNext,
                                                             VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_PROPERTIES)) {
    s->subgroupSize = state.lanes, s->supportedStages = VK_SHADER_STAGE_COMPUTE_BIT;
    s->supportedOperations = VK_SUBGROUP_FEATURE_BASIC_BIT | VK_SUBGROUP_FEATURE_SHUFFLE_BIT;
    if (has("vote")) s->supportedOperations |= VK_SUBGROUP_FEATURE_VOTE_BIT;
  }
}
void VKAPI_CALL features(VkPhysicalDevice, VkPhysicalDeviceFeatures2* out) {
  out->features.shaderInt64 = has("shaderInt64");
  auto* twelve =
      in_chain<VkPhysicalDeviceVulkan12Features>(out->pNext, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES);
  twelve->bufferDeviceAddress = has("bufferDeviceAddress");
  twelve->scalarBlockLayout = has("scalarBlockLayout");
  twelve->timelineSemaphore = has("timelineSemaphore");
  twelve->vulkanMemoryModel = has("vulkanMemoryModel");
  twelve->shaderFloat16 = has("shaderFloat16");
  if (auto* s =
          in_chain<VkPhysicalDeviceVulkan11Features>(out->pNext, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES))
    s->storageBuffer16BitAccess = has("storageBuffer16BitAccess");
  if (auto* s = in_chain<VkPhysicalDeviceSubgroupSizeControlFeatures>(
          out->pNext, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_FEATURES))
    s->computeFullSubgroups = has("computeFullSubgroups");
  struct Matrices {  // newer than Debian 12's headers
    VkBaseOutStructure head;
    VkBool32 there;
  };
  if (auto* s = in_chain<Matrices>(out->pNext, 1000506000)) s->there = has("cooperativeMatrix");
}
VkResult VKAPI_CALL extensions(VkPhysicalDevice, const char*, std::uint32_t* count, VkExtensionProperties* out) {
  const char* const names[] = {"VK_KHR_cooperative_matrix", "VK_EXT_subgroup_size_control"};
  std::uint32_t n = 0;
  for (const char* name : names) {
    if (!state.matrices || !has(name)) continue;
    if (out) std::strcpy(out[n].extensionName, name);
    ++n;
  }
  *count = n;
  return VK_SUCCESS;
}
struct ListedShape {  // VkCooperativeMatrixPropertiesKHR
  VkBaseOutStructure head;
  std::uint32_t shape[3], a, b, c, result, saturates, scope;
};
VkResult VKAPI_CALL list_shapes(VkPhysicalDevice, std::uint32_t* count, ListedShape* out) {
  *count = 2;
  if (!out) return VK_SUCCESS;
  constexpr std::uint32_t f16 = 0, f32 = 1, subgroup = 3;
  for (std::uint32_t n = 0; n < 2; ++n) {  // the first has f16 sums
    std::memcpy(out[n].shape, state.shape, sizeof(state.shape));
    out[n].a = out[n].b = f16, out[n].c = out[n].result = n == 0 ? f16 : f32;
    out[n].scope = subgroup;
  }
  return VK_SUCCESS;
}
void VKAPI_CALL memories(VkPhysicalDevice, VkPhysicalDeviceMemoryProperties* out) {
  *out = {};
  out->memoryTypeCount = 3;  // of a GPU with memory of its own: copies are staged
  out->memoryTypes[0].propertyFlags = VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT;
  out->memoryTypes[1].propertyFlags = VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;
  out->memoryTypes[2].propertyFlags = out->memoryTypes[1].propertyFlags | VK_MEMORY_PROPERTY_HOST_CACHED_BIT;
  out->memoryHeapCount = 1, out->memoryHeaps[0].size = VkDeviceSize{1} << 40;
}
void VKAPI_CALL families(VkPhysicalDevice, std::uint32_t* count, VkQueueFamilyProperties* out) {
  *count = 3;
  if (!out) return;
  out[0] = out[1] = out[2] = {};
  out[0].queueFlags = VK_QUEUE_GRAPHICS_BIT;
  out[1].queueFlags = out[2].queueFlags = state.computes ? VK_QUEUE_COMPUTE_BIT : VK_QUEUE_TRANSFER_BIT;
}
VkResult VKAPI_CALL create_device(VkPhysicalDevice, const VkDeviceCreateInfo*, const VkAllocationCallbacks*,
                                  VkDevice* out) {
  const VkResult result = make(out);
  state.alive -= result == VK_SUCCESS;
  state.devices_alive += result == VK_SUCCESS;
  return result;
}
void VKAPI_CALL destroy_device(VkDevice, const VkAllocationCallbacks*) { --state.devices_alive; }
void VKAPI_CALL get_queue(VkDevice, std::uint32_t, std::uint32_t, VkQueue* out) {
  *out = reinterpret_cast<VkQueue>(std::uintptr_t{0x30});
}
void VKAPI_CALL requirements(VkDevice, VkBuffer, VkMemoryRequirements* out) { *out = {4096, 16, 7}; }
VkResult VKAPI_CALL allocate(VkDevice, const VkMemoryAllocateInfo* info, const VkAllocationCallbacks*,
                             VkDeviceMemory* out) {
  state.memory_type = info->memoryTypeIndex;
  return make(out);
}
VkResult VKAPI_CALL map(VkDevice, VkDeviceMemory, VkDeviceSize, VkDeviceSize, VkMemoryMapFlags, void** out) {
  static char memory[std::size_t{17} << 20];  // of whichever buffer: nobody computes with it
  *out = memory;
  return done();
}
VkDeviceAddress VKAPI_CALL address(VkDevice, const VkBufferDeviceAddressInfo* info) {
  return reinterpret_cast<VkDeviceAddress>(info->buffer) << 20;
}
VkResult VKAPI_CALL cache_data(VkDevice, VkPipelineCache, std::size_t* bytes, void* out) {
  if (!out) *bytes = 32;
  if (out) std::memset(out, 7, *bytes);
  return VK_SUCCESS;
}
VkResult VKAPI_CALL create_cache(VkDevice, const VkPipelineCacheCreateInfo* info, const VkAllocationCallbacks*,
                                 VkPipelineCache* out) {
  state.cached = info->initialDataSize;
  return make(out);
}
// Families of pools; the one command buffer of a pool has its number.
std::map<VkCommandPool, std::uint32_t> pools;
VkResult VKAPI_CALL create_pool(VkDevice, const VkCommandPoolCreateInfo* info, const VkAllocationCallbacks*,
                                VkCommandPool* out) {
  const VkResult result = make(out);
  if (result == VK_SUCCESS) pools[*out] = info->queueFamilyIndex;
  return result;
}
VkResult VKAPI_CALL command_buffers(VkDevice, const VkCommandBufferAllocateInfo* info, VkCommandBuffer* out) {
  *out = reinterpret_cast<VkCommandBuffer>(info->commandPool);
  return done();
}
VkResult VKAPI_CALL pipelines(VkDevice, VkPipelineCache, std::uint32_t, const VkComputePipelineCreateInfo*,
                              const VkAllocationCallbacks*, VkPipeline* out) {
  return make(out);
}
void VKAPI_CALL copy(VkCommandBuffer, VkBuffer from, VkBuffer to, std::uint32_t, const VkBufferCopy* region) {
  state.wrong_copies += !from || !to || region->size == 0;
}
void VKAPI_CALL push(VkCommandBuffer, VkPipelineLayout, VkShaderStageFlags, std::uint32_t, std::uint32_t,
                     const void* values) {
  std::memcpy(&state.parameters, values, sizeof(state.parameters));
}
VkResult VKAPI_CALL fence_status(VkDevice, VkFence) { return state.pending ? VK_NOT_READY : done(); }
VkResult VKAPI_CALL submit(VkQueue, std::uint32_t, const VkSubmitInfo* info, VkFence) {
  const VkResult result = done();
  state.submissions += result == VK_SUCCESS;
  state.family = pools.at(reinterpret_cast<VkCommandPool>(info->pCommandBuffers[0]));
  return result;
}

// Vulkan's functions that make an object have one shape, those that free one have another.
template <class Handle, class Info>
VkResult VKAPI_CALL create(VkDevice, const Info*, const VkAllocationCallbacks*, Handle* out) {
  return make(out);
}
template <class Handle>
void VKAPI_CALL destroy(VkDevice, Handle, const VkAllocationCallbacks*) {
  --state.alive;
}
template <class... Arguments>
VkResult VKAPI_CALL succeed(Arguments...) {
  return done();
}
template <class... Arguments>
void VKAPI_CALL nothing(Arguments...) {}

PFN_vkVoidFunction VKAPI_CALL find(const char* name);
PFN_vkVoidFunction VKAPI_CALL of_device(VkDevice, const char* name) { return find(name); }

template <class Function>
struct Named {
  const char* name;
  Function function;
};

PFN_vkVoidFunction VKAPI_CALL find(const char* name) {
#define FAKE(vk, function)                              \
  if (std::strcmp(name, #vk) == 0) {                    \
    const PFN_##vk typed = function;                    \
    return reinterpret_cast<PFN_vkVoidFunction>(typed); \
  }
  FAKE(vkCreateInstance, create_instance)
  FAKE(vkEnumeratePhysicalDevices, enumerate)
  FAKE(vkGetPhysicalDeviceProperties2, properties)
  FAKE(vkGetPhysicalDeviceFeatures2, features)
  FAKE(vkEnumerateDeviceExtensionProperties, extensions)
  if (std::strcmp(name, "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR") == 0)
    return reinterpret_cast<PFN_vkVoidFunction>(list_shapes);
  FAKE(vkGetPhysicalDeviceMemoryProperties, memories)
  FAKE(vkGetPhysicalDeviceQueueFamilyProperties, families)
  FAKE(vkCreateDevice, create_device)
  FAKE(vkDestroyDevice, destroy_device)
  FAKE(vkGetDeviceProcAddr, of_device)
  FAKE(vkGetDeviceQueue, get_queue)
  FAKE(vkCreateBuffer, create)
  FAKE(vkDestroyBuffer, destroy)
  FAKE(vkGetBufferMemoryRequirements, requirements)
  FAKE(vkAllocateMemory, allocate)
  FAKE(vkFreeMemory, destroy)
  FAKE(vkBindBufferMemory, succeed)
  FAKE(vkMapMemory, map)
  FAKE(vkGetBufferDeviceAddress, address)
  FAKE(vkCreateShaderModule, create)
  FAKE(vkDestroyShaderModule, destroy)
  FAKE(vkCreatePipelineLayout, create)
  FAKE(vkDestroyPipelineLayout, destroy)
  FAKE(vkCreatePipelineCache, create_cache)
  FAKE(vkGetPipelineCacheData, cache_data)
  FAKE(vkDestroyPipelineCache, destroy)
  FAKE(vkCreateComputePipelines, pipelines)
  FAKE(vkDestroyPipeline, destroy)
  FAKE(vkCreateCommandPool, create_pool)
  FAKE(vkDestroyCommandPool, destroy)
  FAKE(vkResetCommandPool, succeed)
  FAKE(vkAllocateCommandBuffers, command_buffers)
  FAKE(vkBeginCommandBuffer, succeed)
  FAKE(vkEndCommandBuffer, succeed)
  FAKE(vkCmdBindPipeline, nothing)
  FAKE(vkCmdPushConstants, push)
  FAKE(vkCmdDispatch, nothing)
  FAKE(vkCmdPipelineBarrier, nothing)
  FAKE(vkCmdCopyBuffer, copy)
  FAKE(vkCreateFence, create)
  FAKE(vkDestroyFence, destroy)
  FAKE(vkResetFences, succeed)
  FAKE(vkGetFenceStatus, fence_status)
  FAKE(vkWaitForFences, succeed)
  FAKE(vkQueueSubmit, submit)
#undef FAKE
  return nullptr;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) FakeVulkan* tessera_fake_vulkan() { return &state; }

}  // namespace tessera::test

extern "C" __attribute__((visibility("default"))) PFN_vkVoidFunction VKAPI_CALL
vkGetInstanceProcAddr(VkInstance, const char* name) {
  return tessera::test::find(name);
}
