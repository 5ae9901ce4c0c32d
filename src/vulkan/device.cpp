// SPDX-License-Identifier: Apache-2.0
// Facts, pipelines, memory and submissions of one Vulkan device; see device.hpp.
#include "vulkan/device.hpp"

#include <algorithm>
#include <cstring>

#include "core/failure.hpp"
#include "cuda/jit/cache.hpp"
#include "cuda/jit/sha256.hpp"

namespace tessera::vulkan {
namespace {

constexpr std::uint32_t widest_grid = 65535;            // workgroups along one dimension that every device takes
constexpr std::uint32_t nvidia = 0x10de, amd = 0x1002;  // as PCI numbers vendors
constexpr std::size_t staging_bytes = std::size_t{16} << 20;

bool takes_compute(const InstanceFunctions& f, VkPhysicalDevice physical, std::uint32_t family, std::uint32_t& count) {
  f.GetPhysicalDeviceQueueFamilyProperties(physical, &count, nullptr);
  std::vector<VkQueueFamilyProperties> families(count);
  f.GetPhysicalDeviceQueueFamilyProperties(physical, &count, families.data());
  return family < count && (families[family].queueFlags & VK_QUEUE_COMPUTE_BIT) != 0;
}

}  // namespace

Facts facts_of(const InstanceFunctions& f, VkPhysicalDevice physical) {
  auto driver = of_type<VkPhysicalDeviceDriverProperties>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_DRIVER_PROPERTIES);
  auto properties = of_type<VkPhysicalDeviceProperties2>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2, &driver);
  f.GetPhysicalDeviceProperties2(physical, &properties);
  Facts facts;
  facts.name = properties.properties.deviceName, facts.api = properties.properties.apiVersion;
  facts.ends_long_loops = driver.driverID == VK_DRIVER_ID_MESA_LLVMPIPE;
  if (facts.api < VK_API_VERSION_1_2) {
    facts.missing = text("it speaks Vulkan ", VK_API_VERSION_MAJOR(facts.api), ".", VK_API_VERSION_MINOR(facts.api),
                         "; 1.2 is needed");
    return facts;
  }
  // Before it, constants that say how long arrays are kept their defaults there, and the kernels' tiles are arrays.
  constexpr std::uint32_t first_moltenvk = 10300;
  const std::uint32_t driver_version = properties.properties.driverVersion;
  if (driver.driverID == VK_DRIVER_ID_MOLTENVK && driver_version < first_moltenvk)
    facts.missing = text("it is MoltenVK ", driver_version / 10000, ".", driver_version / 100 % 100, ".",
                         driver_version % 100, "; 1.3.0 is needed");
  auto features11 = of_type<VkPhysicalDeviceVulkan11Features>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES);
  auto features12 =
      of_type<VkPhysicalDeviceVulkan12Features>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES, &features11);
  auto features = of_type<VkPhysicalDeviceFeatures2>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2, &features12);
  f.GetPhysicalDeviceFeatures2(physical, &features);
  const std::pair<const char*, VkBool32> needed[] = {{"bufferDeviceAddress", features12.bufferDeviceAddress},
                                                     {"scalarBlockLayout", features12.scalarBlockLayout},
                                                     {"timelineSemaphore", features12.timelineSemaphore},
                                                     {"shaderInt64", features.features.shaderInt64},
                                                     {"storageBuffer16BitAccess", features11.storageBuffer16BitAccess}};
  for (const auto& [name, there] : needed)
    if (!there && facts.missing.empty()) facts.missing = text("it lacks the feature ", name);
  if (facts.missing.empty() && properties.properties.limits.maxComputeSharedMemorySize < 32768)
    facts.missing = text("it has ", properties.properties.limits.maxComputeSharedMemorySize,
                         " bytes of shared memory; 32768 are needed");
  std::uint32_t count = 0;
  if (facts.missing.empty() && !takes_compute(f, physical, compute_family(f, physical), count))
    facts.missing = "it has no queue for compute work";
  if (facts.missing.empty()) facts.matrices = matrix_facts(f, physical);
  const VkPhysicalDeviceLimits& limits = properties.properties.limits;
  facts.matrices.gpu = properties.properties.deviceType != VK_PHYSICAL_DEVICE_TYPE_CPU;
  const std::uint32_t vendor = properties.properties.vendorID;
  facts.matrices.many_registers = facts.matrices.gpu && (vendor == nvidia || vendor == amd);
  const auto held = [](std::uint32_t limit) { return static_cast<std::int32_t>(std::min(limit, 1U << 20)); };
  facts.matrices.invocations = held(std::min(limits.maxComputeWorkGroupInvocations, limits.maxComputeWorkGroupSize[0]));
  facts.matrices.shared_bytes = held(limits.maxComputeSharedMemorySize);
  return facts;
}

DeviceContext::DeviceContext(const InstanceFunctions& functions, VkPhysicalDevice physical) :
    functions(functions), physical(physical), family(compute_family(functions, physical)), owned(true),
    known(facts_of(functions, physical)) {
  device = create_device(functions, physical, family, known);
  try {
    f = device_functions(functions, device);
    f.GetDeviceQueue(device, family, 0, &own_queue);
    prepare();
  } catch (...) {
    const auto destroyer = functions.GetDeviceProcAddr(device, "vkDestroyDevice");
    if (destroyer) reinterpret_cast<PFN_vkDestroyDevice>(destroyer)(device, nullptr);
    throw;
  }
}

DeviceContext::DeviceContext(const InstanceFunctions& functions, const tessera_vulkan_queue& given) :
    functions(functions), physical(static_cast<VkPhysicalDevice>(given.physical_device)),
    device(static_cast<VkDevice>(given.device)), owned(false), known(facts_of(functions, physical)) {
  check_family(given.queue_family);
  f = device_functions(functions, device);
  prepare();
}

// A device may have queues of several families, and each call brings one.
void DeviceContext::check_family(std::uint32_t of_queue) const {
  std::uint32_t count = 0;
  if (!takes_compute(functions, physical, of_queue, count))
    invalid("stream: queue_family is ", of_queue, "; must be one of the device's ", count,
            " families, and one that takes compute work");
}

// What is made so far is freed if something fails.
void DeviceContext::prepare() {
  try {
    functions.GetPhysicalDeviceMemoryProperties(physical, &memories);
    layout = make_layout(f, device);
    load_pipeline_cache();
  } catch (...) {
    destroy();
    throw;
  }
}

DeviceContext::~DeviceContext() { destroy(); }

// The library's own device stays: once it can be used, it lives as long as the process.
void DeviceContext::destroy() {
  for (auto& slot : slots) {
    if (slot->submitted) f.WaitForFences(device, 1, &slot->fence, VK_TRUE, UINT64_MAX);
    destroy_buffer(slot->parameters);
    destroy_buffer(slot->near_parameters);
    if (slot->fence) f.DestroyFence(device, slot->fence, nullptr);
    if (slot->pool) f.DestroyCommandPool(device, slot->pool, nullptr);
  }
  slots.clear();
  for (auto& [key, pipeline] : pipelines) f.DestroyPipeline(device, pipeline, nullptr);
  pipelines.clear();
  if (pipeline_cache) f.DestroyPipelineCache(device, pipeline_cache, nullptr);
  if (layout) f.DestroyPipelineLayout(device, layout, nullptr);
}

// --- pipelines

std::string DeviceContext::cache_key() const {
  auto properties = of_type<VkPhysicalDeviceProperties2>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2);
  functions.GetPhysicalDeviceProperties2(physical, &properties);
  const auto& p = properties.properties;
  const auto* uuid = reinterpret_cast<const char*>(p.pipelineCacheUUID);
  return cuda::Sha256()
      .add_field("vulkan")
      .add_field({uuid, VK_UUID_SIZE})
      .add_field(text(p.vendorID, " ", p.deviceID, " ", p.driverVersion))
      .hex();
}

// The driver looks at the header of what it is given, and ignores what is not its own.
void DeviceContext::load_pipeline_cache() {
  const auto stored = cuda::DiskCache(cuda::cache_folder(), ".pipelines").read(cache_key());
  auto info = of_type<VkPipelineCacheCreateInfo>(VK_STRUCTURE_TYPE_PIPELINE_CACHE_CREATE_INFO);
  if (stored) info.initialDataSize = stored->size(), info.pInitialData = stored->data();
  cached_bytes = info.initialDataSize;
  check(f.CreatePipelineCache(device, &info, nullptr, &pipeline_cache), "vkCreatePipelineCache");
}

void DeviceContext::save_pipeline_cache() {
  std::size_t bytes = 0;
  if (f.GetPipelineCacheData(device, pipeline_cache, &bytes, nullptr) != VK_SUCCESS || bytes == cached_bytes) return;
  std::vector<char> data(bytes);
  if (f.GetPipelineCacheData(device, pipeline_cache, &bytes, data.data()) != VK_SUCCESS) return;
  data.resize(bytes);
  cuda::DiskCache(cuda::cache_folder(), ".pipelines").write(cache_key(), data);
  cached_bytes = bytes;
}

VkPipeline DeviceContext::pipeline(const Shader& shader, const Constants& constants) {
  const std::lock_guard lock(pipelines_mutex);
  VkPipeline& made = pipelines[{shader.name, constants}];
  if (made) return made;
  made = make_pipeline(f, device, layout, pipeline_cache, shader, constants);
  save_pipeline_cache();
  return made;
}

// --- memory

Buffer DeviceContext::make_buffer(std::size_t bytes, VkMemoryPropertyFlags wanted, VkMemoryPropertyFlags preferred) {
  std::uint64_t most = 0;  // what no heap has is not asked for: drivers take such sizes for errors, or for small ones
  for (std::uint32_t n = 0; n < memories.memoryHeapCount; ++n) most = std::max(most, memories.memoryHeaps[n].size);
  if (bytes > most)
    throw Failure(TESSERA_OUT_OF_MEMORY,
                  text("a buffer of ", bytes, " bytes is asked for; the device's largest heap has ", most));
  Buffer made;
  made.bytes = bytes;
  auto info = of_type<VkBufferCreateInfo>(VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO);
  info.size = bytes > 0 ? (bytes + 15) / 16 * 16 : 16;
  info.usage = VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT |
               VK_BUFFER_USAGE_TRANSFER_SRC_BIT | VK_BUFFER_USAGE_TRANSFER_DST_BIT;
  const auto of_bytes = [&](const char* call) { return text(call, " of ", bytes, " bytes"); };
  check(f.CreateBuffer(device, &info, nullptr, &made.buffer), of_bytes("vkCreateBuffer").c_str());
  try {
    VkMemoryRequirements needs{};
    f.GetBufferMemoryRequirements(device, made.buffer, &needs);
    std::uint32_t type = memories.memoryTypeCount;
    for (const VkMemoryPropertyFlags flags : {wanted | preferred, wanted})
      for (std::uint32_t n = 0; n < memories.memoryTypeCount && type == memories.memoryTypeCount; ++n)
        if ((needs.memoryTypeBits >> n & 1) && (memories.memoryTypes[n].propertyFlags & flags) == flags) type = n;
    if (type == memories.memoryTypeCount) throw Failure(TESSERA_DEVICE_ERROR, "the device has no memory of the kind");
    auto with_address = of_type<VkMemoryAllocateFlagsInfo>(VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_FLAGS_INFO);
    with_address.flags = VK_MEMORY_ALLOCATE_DEVICE_ADDRESS_BIT;
    auto allocation = of_type<VkMemoryAllocateInfo>(VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO, &with_address);
    allocation.allocationSize = needs.size, allocation.memoryTypeIndex = type;
    check(f.AllocateMemory(device, &allocation, nullptr, &made.memory), of_bytes("vkAllocateMemory").c_str());
    check(f.BindBufferMemory(device, made.buffer, made.memory, 0), "vkBindBufferMemory");
    made.local = (memories.memoryTypes[type].propertyFlags & VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT) != 0;
    const VkMemoryPropertyFlags seen = VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;
    if ((memories.memoryTypes[type].propertyFlags & seen) == seen) {
      void* mapped = nullptr;
      check(f.MapMemory(device, made.memory, 0, VK_WHOLE_SIZE, 0, &mapped), "vkMapMemory");
      made.mapped = static_cast<std::byte*>(mapped);
    }
    auto address = of_type<VkBufferDeviceAddressInfo>(VK_STRUCTURE_TYPE_BUFFER_DEVICE_ADDRESS_INFO);
    address.buffer = made.buffer;
    made.address = f.GetBufferDeviceAddress(device, &address);
  } catch (...) {
    destroy_buffer(made);
    throw;
  }
  return made;
}

void DeviceContext::destroy_buffer(Buffer& buffer) {
  if (buffer.buffer) f.DestroyBuffer(device, buffer.buffer, nullptr);
  if (buffer.memory) f.FreeMemory(device, buffer.memory, nullptr);
  buffer = {};
}

VkDeviceAddress DeviceContext::allocate(std::size_t bytes) {
  const std::lock_guard lock(memory_mutex);
  Buffer made = make_buffer(bytes, VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT, 0);
  try {
    allocations.emplace(made.address, made);
  } catch (...) {
    destroy_buffer(made);
    throw;
  }
  return made.address;
}

void DeviceContext::release(VkDeviceAddress address) {
  const std::lock_guard lock(memory_mutex);
  const auto found = allocations.find(address);
  if (found == allocations.end()) invalid("data: is not the beginning of an allocation of this device");
  destroy_buffer(found->second);
  allocations.erase(found);
}

void DeviceContext::copy(VkDeviceAddress address, void* host, std::size_t bytes, bool to_device) {
  Buffer target;
  {
    const std::lock_guard lock(memory_mutex);
    auto found = allocations.upper_bound(address);
    const bool inside = found != allocations.begin() && (--found, address - found->first <= found->second.bytes) &&
                        bytes <= found->second.bytes - (address - found->first);
    if (!inside) invalid("data: ", bytes, " bytes from there on are not inside one allocation of this device");
    target = found->second;
  }
  const std::size_t at = address - target.address;
  if (!target.mapped) return copy_staged(target, at, static_cast<std::byte*>(host), bytes, to_device);
  if (to_device)
    std::memcpy(target.mapped + at, host, bytes);
  else
    std::memcpy(host, target.mapped + at, bytes);
}

void DeviceContext::copy_staged(const Buffer& target, std::size_t at, std::byte* host, std::size_t bytes,
                                bool to_device) {
  for (std::size_t done = 0; done < bytes;) {
    const std::size_t part = std::min(bytes - done, staging_bytes);
    Slot& slot = take_slot(part, family);
    bool submitted = false;
    try {
      if (to_device) std::memcpy(slot.parameters.mapped, host + done, part);
      begin(slot);
      const VkBufferCopy region{to_device ? 0 : at + done, to_device ? at + done : 0, part};
      f.CmdCopyBuffer(slot.commands, to_device ? slot.parameters.buffer : target.buffer,
                      to_device ? target.buffer : slot.parameters.buffer, 1, &region);
      submit(slot, own_queue, nullptr);
      submitted = true;
      wait(slot);
      if (!to_device) std::memcpy(host + done, slot.parameters.mapped, part);
    } catch (...) {
      give_back(slot, submitted);
      throw;
    }
    give_back(slot, false);
    done += part;
  }
}

// --- submissions

// One that is free, with room for the parameters.
DeviceContext::Slot& DeviceContext::take_slot(std::size_t parameter_bytes, std::uint32_t of_queue) {
  const std::lock_guard lock(slots_mutex);
  Slot* free = nullptr;
  for (auto& slot : slots) {
    if (slot->submitted && f.GetFenceStatus(device, slot->fence) == VK_SUCCESS) slot->submitted = slot->busy = false;
    if (!slot->busy && !free && slot->family == of_queue) free = slot.get();
  }
  if (!free) free = slots.emplace_back(std::make_unique<Slot>(of_queue)).get();
  if (!free->pool) {
    auto info = of_type<VkCommandPoolCreateInfo>(VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO);
    info.queueFamilyIndex = of_queue;
    check(f.CreateCommandPool(device, &info, nullptr, &free->pool), "vkCreateCommandPool");
  }
  if (!free->commands) {
    auto info = of_type<VkCommandBufferAllocateInfo>(VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO);
    info.commandPool = free->pool, info.commandBufferCount = 1;
    check(f.AllocateCommandBuffers(device, &info, &free->commands), "vkAllocateCommandBuffers");
  }
  if (!free->fence) {
    const auto info = of_type<VkFenceCreateInfo>(VK_STRUCTURE_TYPE_FENCE_CREATE_INFO);
    check(f.CreateFence(device, &info, nullptr, &free->fence), "vkCreateFence");
  }
  if (free->parameters.bytes < parameter_bytes) {
    destroy_buffer(free->parameters);
    free->parameters = make_buffer(std::max<std::size_t>(parameter_bytes, 16384),
                                   VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT,
                                   VK_MEMORY_PROPERTY_HOST_CACHED_BIT);  // downloads read it
  }
  free->busy = true;
  return *free;
}

// `submitted`: the device may still use it; it is free when its fence says so.
void DeviceContext::give_back(Slot& slot, bool submitted) {
  const std::lock_guard lock(slots_mutex);
  slot.submitted = submitted;
  slot.busy = submitted;
}

void DeviceContext::barrier(VkCommandBuffer commands) const {
  auto all = of_type<VkMemoryBarrier>(VK_STRUCTURE_TYPE_MEMORY_BARRIER);
  all.srcAccessMask = VK_ACCESS_MEMORY_WRITE_BIT;
  all.dstAccessMask = VK_ACCESS_MEMORY_READ_BIT | VK_ACCESS_MEMORY_WRITE_BIT;
  f.CmdPipelineBarrier(commands, VK_PIPELINE_STAGE_ALL_COMMANDS_BIT,
                       VK_PIPELINE_STAGE_ALL_COMMANDS_BIT | VK_PIPELINE_STAGE_HOST_BIT, 0, 1, &all, 0, nullptr, 0,
                       nullptr);
}

void DeviceContext::begin(Slot& slot) {
  check(f.ResetCommandPool(device, slot.pool, 0), "vkResetCommandPool");
  check(f.ResetFences(device, 1, &slot.fence), "vkResetFences");
  auto info = of_type<VkCommandBufferBeginInfo>(VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO);
  info.flags = VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT;
  check(f.BeginCommandBuffer(slot.commands, &info), "vkBeginCommandBuffer");
  barrier(slot.commands);  // what the queue did before is seen
}

void DeviceContext::submit(Slot& slot, VkQueue queue, tessera_vulkan_queue* given) {
  barrier(slot.commands);
  check(f.EndCommandBuffer(slot.commands), "vkEndCommandBuffer");
  auto info = of_type<VkSubmitInfo>(VK_STRUCTURE_TYPE_SUBMIT_INFO);
  info.commandBufferCount = 1, info.pCommandBuffers = &slot.commands;
  auto values = of_type<VkTimelineSemaphoreSubmitInfo>(VK_STRUCTURE_TYPE_TIMELINE_SEMAPHORE_SUBMIT_INFO);
  VkSemaphore semaphore = VK_NULL_HANDLE;
  const std::uint64_t before = given ? given->value : 0, after = before + 1;
  const VkPipelineStageFlags stage = VK_PIPELINE_STAGE_ALL_COMMANDS_BIT;
  if (given && given->semaphore) {
    semaphore = reinterpret_cast<VkSemaphore>(given->semaphore);
    info.pNext = &values;
    info.waitSemaphoreCount = info.signalSemaphoreCount = 1;
    info.pWaitSemaphores = info.pSignalSemaphores = &semaphore;
    info.pWaitDstStageMask = &stage;
    values.waitSemaphoreValueCount = values.signalSemaphoreValueCount = 1;
    values.pWaitSemaphoreValues = &before, values.pSignalSemaphoreValues = &after;
  }
  const std::lock_guard lock(queue_mutex);
  check(f.QueueSubmit(queue, 1, &info, slot.fence), "vkQueueSubmit");
}

void DeviceContext::wait(Slot& slot) {
  check(f.WaitForFences(device, 1, &slot.fence, VK_TRUE, UINT64_MAX), "vkWaitForFences");
}

// Where kernels find the parameters: they read them in loops, which must not go through the host's memory.
VkDeviceAddress DeviceContext::near_parameters(Slot& slot, std::size_t bytes) {
  if (slot.parameters.local) return slot.parameters.address;
  Buffer& near = slot.near_parameters;
  if (near.bytes < bytes) {
    destroy_buffer(near);
    near = make_buffer(std::max<std::size_t>(bytes, 16384), VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT, 0);
  }
  const VkBufferCopy region{0, 0, bytes};
  f.CmdCopyBuffer(slot.commands, slot.parameters.buffer, near.buffer, 1, &region);
  barrier(slot.commands);
  return near.address;
}

void DeviceContext::run(std::span<const Dispatch> list, tessera_vulkan_queue* queue) {
  std::size_t bytes = 0;
  const auto rounded = [](std::size_t n) { return (n + 63) / 64 * 64; };
  for (const Dispatch& d : list) bytes += rounded(d.block.size());
  if (queue) check_family(queue->queue_family);
  Slot& slot = take_slot(bytes, queue ? queue->queue_family : family);
  bool submitted = false;
  try {
    begin(slot);
    std::size_t at = 0;
    for (const Dispatch& d : list) {
      std::memcpy(slot.parameters.mapped + at, d.block.data(), d.block.size());
      at += rounded(d.block.size());
    }
    const VkDeviceAddress first = list.empty() ? 0 : near_parameters(slot, bytes);  // no rows, or no heads: no copy
    at = 0;
    for (const Dispatch& d : list) {
      const VkDeviceAddress address = first + at;
      at += rounded(d.block.size());
      f.CmdBindPipeline(slot.commands, VK_PIPELINE_BIND_POINT_COMPUTE, d.pipeline);
      f.CmdPushConstants(slot.commands, layout, VK_SHADER_STAGE_COMPUTE_BIT, 0, sizeof(address), &address);
      const auto wide = static_cast<std::uint32_t>(std::min<std::int64_t>(d.workgroups, widest_grid));
      const auto high = static_cast<std::uint32_t>((d.workgroups + wide - 1) / wide);
      f.CmdDispatch(slot.commands, wide, high, 1);
      barrier(slot.commands);
    }
    submit(slot, queue ? static_cast<VkQueue>(queue->queue) : own_queue, queue);
    submitted = true;
    const bool asynchronous = queue && queue->semaphore;
    if (asynchronous) ++queue->value;
    if (!asynchronous) wait(slot);
    give_back(slot, asynchronous);
  } catch (...) {
    give_back(slot, submitted);
    throw;
  }
}

}  // namespace tessera::vulkan
