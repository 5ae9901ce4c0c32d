/* SPDX-License-Identifier: Apache-2.0 */
/* Vulkan devices: where calls run whose tensors have device_type TESSERA_DEVICE_VULKAN. From C99 and C++20; Vulkan's
 * own headers are not needed. What runs there, and what it was run on: docs/vulkan.md.
 *
 * `data` of such a tensor is a VkDeviceAddress. tessera_execution.stream says whose device it is:
 * - NULL: the library's own, number device_id of this machine. Memory comes from tessera_vulkan_allocate, and a call
 *   returns when its work is done.
 * - the address of a tessera_vulkan_queue: the caller's. Memory is any buffer of that device made with
 *   VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT. The device must have been made with the features bufferDeviceAddress,
 *   scalarBlockLayout, timelineSemaphore, shaderInt64 and storageBuffer16BitAccess. device_id is 0. */
#ifndef TESSERA_VULKAN_H
#define TESSERA_VULKAN_H

#include "tessera/tessera.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The caller's device and queue. The queue is used during the call alone: as Vulkan demands, no other thread may use it
 * then. */
typedef struct tessera_vulkan_queue {
  size_t size;           /* sizeof(tessera_vulkan_queue) */
  void* instance;        /* VkInstance */
  void* physical_device; /* VkPhysicalDevice */
  void* device;          /* VkDevice */
  void* queue;           /* VkQueue */
  uint32_t queue_family; /* of the queue; it must take compute work */
  uint32_t reserved;     /* 0 */
  uint64_t semaphore;    /* a timeline VkSemaphore; 0: the call returns when its work is done */
  uint64_t value; /* the work waits until the semaphore has it. The call adds 1 to it, and returns when the work */
                  /* is enqueued; the semaphore has the new value when it is done */
} tessera_vulkan_queue;

/* Sets the size; everything else is 0. */
TESSERA_API void tessera_vulkan_queue_init(tessera_vulkan_queue* queue);

/* What the library made on a caller's device (pipelines, buffers of parameters) is freed; work that is under way is
 * waited for. To be called before vkDestroyDevice, when no other call uses the device. */
TESSERA_API tessera_status tessera_vulkan_release(const tessera_vulkan_queue* queue);

/* The library's own devices: those that can run its kernels, in the driver's order. 0 and a status other than
 * TESSERA_OK where there is none; the sentence says why. */
TESSERA_API tessera_status tessera_vulkan_device_count(int32_t* count);

/* Each is for memory of the library's own devices. Its content is undefined at first; free takes NULL. upload and
 * download copy between the host and any part of an allocation, and return when it is done. */
TESSERA_API tessera_status tessera_vulkan_allocate(int32_t device_id, size_t bytes, void** data);
TESSERA_API tessera_status tessera_vulkan_free(int32_t device_id, void* data);
TESSERA_API tessera_status tessera_vulkan_upload(int32_t device_id, void* data, const void* host, size_t bytes);
TESSERA_API tessera_status tessera_vulkan_download(int32_t device_id, void* host, const void* data, size_t bytes);

#ifdef __cplusplus
}

#include <utility>

#include "tessera/tessera.hpp"

namespace tessera {

/* Memory of a Vulkan device of the library's own, freed at the end of its scope. */
class VulkanMemory {
 public:
  explicit VulkanMemory(std::size_t bytes, std::int32_t device_id = 0) : id(device_id), length(bytes) {
    detail::check(tessera_vulkan_allocate(id, bytes, &address));
  }
  VulkanMemory(VulkanMemory&& other) noexcept :
      address(std::exchange(other.address, nullptr)), id(other.id), length(other.length) {}
  VulkanMemory& operator=(VulkanMemory&&) = delete;
  ~VulkanMemory() { tessera_vulkan_free(id, address); }

  void* data() const { return address; }
  std::size_t size() const { return length; }
  void upload(const void* host, std::size_t bytes, std::size_t at = 0) const {
    detail::check(tessera_vulkan_upload(id, static_cast<char*>(address) + at, host, bytes));
  }
  void download(void* host, std::size_t bytes, std::size_t at = 0) const {
    detail::check(tessera_vulkan_download(id, host, static_cast<char*>(address) + at, bytes));
  }

 private:
  void* address = nullptr;
  std::int32_t id;
  std::size_t length;
};

/* How many devices of the library's own there are; an Error says why there is none. */
inline int vulkan_device_count() {
  std::int32_t count = 0;
  detail::check(tessera_vulkan_device_count(&count));
  return count;
}

}  // namespace tessera
#endif

#endif
