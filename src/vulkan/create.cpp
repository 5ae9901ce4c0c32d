// SPDX-License-Identifier: Apache-2.0
// Makes devices and pipelines, for the library and for tests that ask a driver what it makes of them; see device.hpp.
#include "vulkan/device.hpp"

namespace tessera::vulkan {

std::uint32_t compute_family(const InstanceFunctions& f, VkPhysicalDevice physical) {
  std::uint32_t count = 0;
  f.GetPhysicalDeviceQueueFamilyProperties(physical, &count, nullptr);
  std::vector<VkQueueFamilyProperties> families(count);
  f.GetPhysicalDeviceQueueFamilyProperties(physical, &count, families.data());
  for (std::uint32_t n = 0; n < count; ++n)
    if (families[n].queueFlags & VK_QUEUE_COMPUTE_BIT) return n;
  return count;
}

VkDevice create_device(const InstanceFunctions& functions, VkPhysicalDevice physical, std::uint32_t family,
                       const Facts& facts, const char* extension, void* extension_features) {
  const float priority = 1;
  auto queue = of_type<VkDeviceQueueCreateInfo>(VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO);
  queue.queueFamilyIndex = family, queue.queueCount = 1, queue.pQueuePriorities = &priority;
  auto features11 = of_type<VkPhysicalDeviceVulkan11Features>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES,
                                                              extension_features);
  features11.storageBuffer16BitAccess = VK_TRUE;
  auto features12 =
      of_type<VkPhysicalDeviceVulkan12Features>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES, &features11);
  features12.bufferDeviceAddress = features12.scalarBlockLayout = features12.timelineSemaphore = VK_TRUE;
  auto features = of_type<VkPhysicalDeviceFeatures2>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2, &features12);
  features.features.shaderInt64 = VK_TRUE;
  auto info = of_type<VkDeviceCreateInfo>(VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO, &features);
  info.queueCreateInfoCount = 1, info.pQueueCreateInfos = &queue;
  std::vector<const char*> extensions;
  if (extension) extensions.push_back(extension);
  MatrixFeatures matrices(facts.matrices);
  matrices.add_to(features12, info, extensions);
  info.enabledExtensionCount = static_cast<std::uint32_t>(extensions.size());
  info.ppEnabledExtensionNames = extensions.data();
  VkDevice device = VK_NULL_HANDLE;
  check(functions.CreateDevice(physical, &info, nullptr, &device), "vkCreateDevice");
  return device;
}

VkPipelineLayout make_layout(const DeviceFunctions& f, VkDevice device) {
  const VkPushConstantRange push{VK_SHADER_STAGE_COMPUTE_BIT, 0, sizeof(VkDeviceAddress)};
  auto info = of_type<VkPipelineLayoutCreateInfo>(VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO);
  info.pushConstantRangeCount = 1, info.pPushConstantRanges = &push;
  VkPipelineLayout layout = VK_NULL_HANDLE;
  check(f.CreatePipelineLayout(device, &info, nullptr, &layout), "vkCreatePipelineLayout");
  return layout;
}

VkPipeline make_pipeline(const DeviceFunctions& f, VkDevice device, VkPipelineLayout layout, VkPipelineCache cache,
                         const Shader& shader, const Constants& constants, VkPipelineCreateFlags flags) {
  auto code = of_type<VkShaderModuleCreateInfo>(VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO);
  code.codeSize = shader.code.size_bytes(), code.pCode = shader.code.data();
  VkShaderModule module = VK_NULL_HANDLE;
  check(f.CreateShaderModule(device, &code, nullptr, &module), "vkCreateShaderModule");
  std::array<VkSpecializationMapEntry, std::tuple_size_v<Constants>> entries{};
  for (std::uint32_t n = 0; n < entries.size(); ++n) entries[n] = {n, n * 4, 4};
  const VkSpecializationInfo special{entries.size(), entries.data(), sizeof(constants), constants.data()};
  auto info = of_type<VkComputePipelineCreateInfo>(VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO);
  info.flags = flags;
  info.stage.sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO;
  info.stage.stage = VK_SHADER_STAGE_COMPUTE_BIT, info.stage.module = module, info.stage.pName = "main";
  info.stage.pSpecializationInfo = &special;
  if (shader.full_subgroups) info.stage.flags = VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT;
  info.layout = layout;
  VkPipeline pipeline = VK_NULL_HANDLE;
  const VkResult result = f.CreateComputePipelines(device, cache, 1, &info, nullptr, &pipeline);
  f.DestroyShaderModule(device, module, nullptr);
  check(result, "vkCreateComputePipelines");
  return pipeline;
}

}  // namespace tessera::vulkan
