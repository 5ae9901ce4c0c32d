// SPDX-License-Identifier: Apache-2.0
// The C ABI's part about Vulkan devices; see tessera/vulkan.h.
#include "tessera/vulkan.h"

#include <cstring>

#include "api/last_error.hpp"
#include "core/failure.hpp"
#include "vulkan/backend.hpp"

using namespace tessera;
using api::guarded;

extern "C" {

void tessera_vulkan_queue_init(tessera_vulkan_queue* queue) {
  std::memset(queue, 0, sizeof(*queue));
  queue->size = sizeof(*queue);
}

tessera_status tessera_vulkan_release(const tessera_vulkan_queue* queue) {
  return guarded([&] {
    if (!queue) invalid("queue: is NULL; it is required");
    vulkan::release(*queue);
  });
}

tessera_status tessera_vulkan_device_count(int32_t* count) {
  return guarded([&] {
    if (!count) invalid("count: is NULL; it is required");
    *count = 0;
    *count = vulkan::device_count();
  });
}

tessera_status tessera_vulkan_allocate(int32_t device_id, size_t bytes, void** data) {
  return guarded([&] {
    if (!data) invalid("data: is NULL; it is required");
    *data = nullptr;
    *data = vulkan::allocate(device_id, bytes);
  });
}

tessera_status tessera_vulkan_free(int32_t device_id, void* data) {
  return guarded([&] {
    if (data) vulkan::free_memory(device_id, data);
  });
}

tessera_status tessera_vulkan_upload(int32_t device_id, void* data, const void* host, size_t bytes) {
  return guarded([&] {
    if (bytes == 0) return;
    if (!host) invalid("host: is NULL but bytes is ", bytes, "; it is required");
    vulkan::upload(device_id, data, host, bytes);
  });
}

tessera_status tessera_vulkan_download(int32_t device_id, void* host, const void* data, size_t bytes) {
  return guarded([&] {
    if (bytes == 0) return;
    if (!host) invalid("host: is NULL but bytes is ", bytes, "; it is required");
    vulkan::download(device_id, host, data, bytes);
  });
}

}  // extern "C"
