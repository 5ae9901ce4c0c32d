// SPDX-License-Identifier: Apache-2.0
// A Vulkan device as the kernels use it, the library's own or a caller's: facts about it, pipelines, memory, and lists
// of dispatches that are recorded and submitted. Included by src/vulkan only. Implements docs/vulkan.md, "Devices and
// memory".
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/vulkan.h"
#include "vulkan/loader.hpp"
#include "vulkan/matrix_facts.hpp"

namespace tessera::vulkan {

// One compiled kernel: SPIR-V that travels inside the library, and its specialization constants.
struct Shader {
  const char* name;
  std::span<const std::uint32_t> code;
  bool full_subgroups = false;  // every one of its subgroups must have all invocations
};
using Constants = std::array<std::int32_t, 13>;

// One dispatch: its parameter block, copied, and how many workgroups.
struct Dispatch {
  VkPipeline pipeline;
  std::span<const std::byte> block;
  std::int64_t workgroups;
};

// What a device is, as far as plans and people want to know.
struct Facts {
  std::string name;
  std::uint32_t api = 0;
  bool ends_long_loops = false;  // llvmpipe: all loops of an invocation end after 65535 rounds
  std::string missing;           // why kernels cannot run there; empty: they can
  MatrixFacts matrices;          // what vk_matrix asks for
};
Facts facts_of(const InstanceFunctions& functions, VkPhysicalDevice physical);

// The first of its queue families that takes compute work; their number: none does.
std::uint32_t compute_family(const InstanceFunctions& functions, VkPhysicalDevice physical);
// A device with a queue of the family, and with what kernels need of what the physical device has. `extension` and its
// features come on top, for tests that ask the driver what it makes of the kernels.
VkDevice create_device(const InstanceFunctions& functions, VkPhysicalDevice physical, std::uint32_t family,
                       const Facts& facts, const char* extension = nullptr, void* extension_features = nullptr);
VkPipelineLayout make_layout(const DeviceFunctions& functions, VkDevice device);
VkPipeline make_pipeline(const DeviceFunctions& functions, VkDevice device, VkPipelineLayout layout,
                         VkPipelineCache cache, const Shader& shader, const Constants& constants,
                         VkPipelineCreateFlags flags = 0);

// A buffer with an address, and its memory; mapped where the host can see it.
struct Buffer {
  VkBuffer buffer = VK_NULL_HANDLE;
  VkDeviceMemory memory = VK_NULL_HANDLE;
  VkDeviceAddress address = 0;
  std::size_t bytes = 0;
  std::byte* mapped = nullptr;
  bool local = false;  // in the device's own memory
};

class DeviceContext {
 public:
  // The library's own device.
  DeviceContext(const InstanceFunctions& functions, VkPhysicalDevice physical);
  // A caller's.
  DeviceContext(const InstanceFunctions& functions, const tessera_vulkan_queue& given);
  ~DeviceContext();  // waits for what is under way; leaves a caller's device as it was
  DeviceContext(const DeviceContext&) = delete;

  const Facts& facts() const { return known; }
  VkPipeline pipeline(const Shader& shader, const Constants& constants);

  // Dispatches in order, each after the one before. `queue`: the caller's, or null for the library's own. Returns when
  // the work is done, or, where the caller has a semaphore, when it is enqueued.
  void run(std::span<const Dispatch> list, tessera_vulkan_queue* queue);

  // Memory of the library's own devices.
  VkDeviceAddress allocate(std::size_t bytes);
  void release(VkDeviceAddress address);
  void copy(VkDeviceAddress device, void* host, std::size_t bytes, bool to_device);

 private:
  struct Slot {            // what one submission needs until it is done
    std::uint32_t family;  // of the queues that it can go to: commands are recorded for one
    VkCommandPool pool = VK_NULL_HANDLE;
    VkCommandBuffer commands = VK_NULL_HANDLE;
    VkFence fence = VK_NULL_HANDLE;
    Buffer parameters;       // what the host writes
    Buffer near_parameters;  // their copy in the device's memory, where the host does not see that
    bool busy = false, submitted = false;
  };

  void prepare();
  void destroy();
  Buffer make_buffer(std::size_t bytes, VkMemoryPropertyFlags wanted, VkMemoryPropertyFlags preferred);
  void destroy_buffer(Buffer& buffer);
  void check_family(std::uint32_t of_queue) const;
  Slot& take_slot(std::size_t parameter_bytes, std::uint32_t of_queue);
  void give_back(Slot& slot, bool submitted);
  VkDeviceAddress near_parameters(Slot& slot, std::size_t bytes);
  void begin(Slot& slot);
  void submit(Slot& slot, VkQueue queue, tessera_vulkan_queue* semaphore);
  void wait(Slot& slot);
  void barrier(VkCommandBuffer commands) const;
  void copy_staged(const Buffer& target, std::size_t at, std::byte* host, std::size_t bytes, bool to_device);
  std::string cache_key() const;
  void load_pipeline_cache();
  void save_pipeline_cache();

  InstanceFunctions functions;
  DeviceFunctions f;
  VkPhysicalDevice physical;
  VkDevice device = VK_NULL_HANDLE;
  VkQueue own_queue = VK_NULL_HANDLE;
  std::uint32_t family = 0;  // of own_queue
  bool owned;
  Facts known;
  VkPhysicalDeviceMemoryProperties memories{};
  VkPipelineLayout layout = VK_NULL_HANDLE;
  VkPipelineCache pipeline_cache = VK_NULL_HANDLE;
  std::size_t cached_bytes = 0;

  std::mutex pipelines_mutex, slots_mutex, queue_mutex, memory_mutex;
  std::map<std::pair<const char*, Constants>, VkPipeline> pipelines;
  std::vector<std::unique_ptr<Slot>> slots;
  std::map<VkDeviceAddress, Buffer> allocations;
};

// The library's own devices. Both throw Failure: where there is no Vulkan, or no such device.
int own_device_count();
DeviceContext& own_device(int number);
// "" where own devices exist; else why not.
std::string missing_devices();

// The context of a caller's device: made at its first use, kept until it is released.
DeviceContext& device_of(const tessera_vulkan_queue& queue);

}  // namespace tessera::vulkan
