// SPDX-License-Identifier: Apache-2.0
// What stands in for the Vulkan backend where it could not be built: every call says so. See backend.hpp.
#include <array>

#include "core/failure.hpp"
#include "core/once.hpp"
#include "vulkan/backend.hpp"

namespace tessera::vulkan {
namespace {

constexpr const char* absent = "this library was built without its Vulkan backend: " TESSERA_VULKAN_MISSING;

[[noreturn]] void refuse() { throw Failure(TESSERA_UNSUPPORTED, absent); }

class AbsentKernel : public Kernel {
 public:
  explicit AbsentKernel(const char* name) : own_name(name) {}
  const char* name() const override { return own_name; }
  DeviceType device() const override { return DeviceType::vulkan; }
  PlanOrReason plan(const Problem&, const Execution&) const override { return {nullptr, absent}; }

 private:
  const char* own_name;
};

}  // namespace

std::span<const Kernel* const> kernels() {
  struct Absent {
    AbsentKernel matrix{"vk_matrix"}, tiled{"vk_tiled"}, naive{"vk_naive"};
    std::array<const Kernel*, 3> all{&matrix, &tiled, &naive};
  };
  static constinit Once<const Absent> made;
  return made.get([] { return Absent(); }).all;
}

std::string devices_text() { return text("none: ", absent); }
int device_count() { refuse(); }
void* allocate(int, std::size_t) { refuse(); }
void free_memory(int, void*) { refuse(); }
void upload(int, void*, const void*, std::size_t) { refuse(); }
void download(int, void*, const void*, std::size_t) { refuse(); }
void release(const tessera_vulkan_queue&) { refuse(); }

}  // namespace tessera::vulkan
