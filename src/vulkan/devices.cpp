// SPDX-License-Identifier: Apache-2.0
// The devices of this process: the library's own, and those that callers brought; and their memory as the C ABI gives
// it. See device.hpp and backend.hpp.
#include <map>

#include "core/failure.hpp"
#include "core/once.hpp"
#include "vulkan/backend.hpp"
#include "vulkan/device.hpp"

namespace tessera::vulkan {
namespace {

// The library's own devices: those that can run the kernels, in the driver's order. `missing`: what is wrong with the
// others.
struct Found {
  InstanceFunctions functions;
  std::vector<VkPhysicalDevice> usable;
  std::vector<Facts> facts;
  std::string missing;
};

Found find_devices() {
  Found found;
  found.functions = instance_functions(find_loader().instance);
  std::uint32_t count = 0;
  check(found.functions.EnumeratePhysicalDevices(find_loader().instance, &count, nullptr),
        "vkEnumeratePhysicalDevices");
  std::vector<VkPhysicalDevice> all(count);
  if (count > 0)
    check(found.functions.EnumeratePhysicalDevices(find_loader().instance, &count, all.data()),
          "vkEnumeratePhysicalDevices");
  for (std::uint32_t n = 0; n < count; ++n) {
    Facts facts = facts_of(found.functions, all[n]);
    if (facts.missing.empty()) {
      found.usable.push_back(all[n]);
      found.facts.push_back(std::move(facts));
    } else {
      found.missing += text(found.missing.empty() ? "" : "; ", facts.name, ": ", facts.missing);
    }
  }
  return found;
}

const Found& devices() {
  if (!find_loader().reason.empty()) throw Failure(TESSERA_DEVICE_ERROR, find_loader().reason);
  static constinit Once<const Found> found;
  return found.get(find_devices);
}

// Contexts that are in use; guarded by the mutex.
struct Contexts {
  std::mutex mutex;
  std::map<int, std::unique_ptr<DeviceContext>> own;
  std::map<void*, std::unique_ptr<DeviceContext>> callers;  // by VkDevice
};
Contexts& contexts() {
  static constinit Once<Contexts> all;
  return all.get([] { return Contexts(); });
}

void check_queue(const tessera_vulkan_queue& q) {
  if (q.size != sizeof(tessera_vulkan_queue))
    invalid("stream: size is ", q.size, "; must be that of a tessera_vulkan_queue, ", sizeof(q),
            ": call tessera_vulkan_queue_init before filling it in");
  const std::pair<const char*, void*> handles[] = {
      {"instance", q.instance}, {"physical_device", q.physical_device}, {"device", q.device}, {"queue", q.queue}};
  for (const auto& [name, handle] : handles)
    if (!handle) invalid("stream: ", name, " is NULL; it is required");
}

VkDeviceAddress address_of(const void* data) { return reinterpret_cast<VkDeviceAddress>(data); }

}  // namespace

std::string missing_devices() {
  if (!find_loader().reason.empty()) return find_loader().reason;
  const Found& found = devices();
  if (!found.usable.empty()) return "";
  return found.missing.empty() ? "Vulkan is there, but no device"
                               : "no Vulkan device can run the kernels: " + found.missing;
}

int own_device_count() {
  if (const std::string missing = missing_devices(); !missing.empty()) throw Failure(TESSERA_DEVICE_ERROR, missing);
  return static_cast<int>(devices().usable.size());
}

DeviceContext& own_device(int number) {
  const int count = own_device_count();
  if (number < 0 || number >= count)
    invalid("device: is vulkan:", number, " but this machine has ", count,
            count == 1 ? " Vulkan device" : " Vulkan devices");
  Contexts& all = contexts();
  const std::lock_guard lock(all.mutex);
  auto& context = all.own[number];
  if (!context)
    context = std::make_unique<DeviceContext>(devices().functions, devices().usable[static_cast<std::size_t>(number)]);
  return *context;
}

DeviceContext& device_of(const tessera_vulkan_queue& queue) {
  check_queue(queue);
  if (!find_loader().get_proc) throw Failure(TESSERA_DEVICE_ERROR, find_loader().reason);
  Contexts& all = contexts();
  const std::lock_guard lock(all.mutex);
  auto& context = all.callers[queue.device];
  if (!context) {
    const InstanceFunctions functions = instance_functions(static_cast<VkInstance>(queue.instance));
    auto made = std::make_unique<DeviceContext>(functions, queue);
    if (!made->facts().missing.empty())
      throw Failure(TESSERA_UNSUPPORTED, text("stream: ", made->facts().name, ": ", made->facts().missing));
    context = std::move(made);
  }
  return *context;
}

void release(const tessera_vulkan_queue& queue) {
  check_queue(queue);
  Contexts& all = contexts();
  const std::lock_guard lock(all.mutex);
  all.callers.erase(queue.device);
}

std::string devices_text() {
  if (const std::string missing = missing_devices(); !missing.empty()) return "none: " + missing;
  std::string out;
  for (std::size_t n = 0; n < devices().facts.size(); ++n) {
    const Facts& facts = devices().facts[n];
    out += text(n ? "; " : "", "vulkan:", n, " ", facts.name, ", Vulkan ", VK_API_VERSION_MAJOR(facts.api), ".",
                VK_API_VERSION_MINOR(facts.api), ".", VK_API_VERSION_PATCH(facts.api));
  }
  return out;
}

int device_count() { return own_device_count(); }
void* allocate(int device, std::size_t bytes) { return reinterpret_cast<void*>(own_device(device).allocate(bytes)); }
void free_memory(int device, void* data) { own_device(device).release(address_of(data)); }
void upload(int device, void* data, const void* host, std::size_t bytes) {
  own_device(device).copy(address_of(data), const_cast<void*>(host), bytes, true);
}
void download(int device, void* host, const void* data, std::size_t bytes) {
  own_device(device).copy(address_of(data), host, bytes, false);
}

}  // namespace tessera::vulkan
