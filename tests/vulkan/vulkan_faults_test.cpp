// SPDX-License-Identifier: Apache-2.0
// Faults of Vulkan, on a libvulkan.so.1 that fails on demand (fake_vulkan.hpp): no device, missing features, queues
// that do not compute, and every call that can fail, failing in turn. Each gives one sentence, submits nothing and
// leaves nothing behind, and the next call works. Links the fake. Implements docs/testing.md.
#include <gtest/gtest.h>

#include <vulkan/vulkan.h>

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <set>
#include <string>

#include "tessera/vulkan.h"
#include "tests/vulkan/fake_vulkan.hpp"

namespace tessera::test {
namespace {

FakeVulkan& fake() { return *tessera_fake_vulkan(); }

// A caller's device, on which nothing of an earlier test is left.
tessera_vulkan_queue queue_of(std::uintptr_t device) {
  tessera_vulkan_queue queue;
  tessera_vulkan_queue_init(&queue);
  queue.instance = reinterpret_cast<void*>(std::uintptr_t{0x10});
  queue.physical_device = reinterpret_cast<void*>(std::uintptr_t{0x20});
  queue.device = reinterpret_cast<void*>(device);
  queue.queue = reinterpret_cast<void*>(std::uintptr_t{0x30});
  queue.queue_family = 1;
  return queue;
}

// One forward pass on a caller's queue; the sentence of its failure, or "".
std::string forward_says(tessera_vulkan_queue& queue, Type type = Type::f32, const char* kernel = nullptr,
                         std::int64_t rows = 40) {
  const Device device{DeviceType::vulkan, 0};
  const auto view = [&](std::intptr_t at) {
    return Tensor(reinterpret_cast<void*>(at), type, {1, rows, 2, 64}, device);
  };
  Inputs in;
  in.q = view(0x100000), in.k = view(0x200000), in.v = view(0x300000);
  try {
    forward(in, {view(0x400000), {}}, {}, {.device = device, .stream = &queue, .kernel = kernel});
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

class FakeVulkanTest : public testing::Test {
 protected:
  void SetUp() override { fake() = {}; }
};

// Devices are looked for once per process, so these are processes of their own (death tests that end well).
std::string count_says() {
  std::int32_t count = 7;
  if (tessera_vulkan_device_count(&count) == TESSERA_OK) return "";
  EXPECT_EQ(count, 0);
  return tessera_last_error();
}
#define EXPECT_IN_CHILD(change, sentence)         \
  EXPECT_EXIT(                                    \
      {                                           \
        change;                                   \
        std::fputs(count_says().c_str(), stderr); \
        std::exit(0);                             \
      },                                          \
      testing::ExitedWithCode(0), sentence)

TEST_F(FakeVulkanTest, NoDeviceThatCanDoIt) {
  EXPECT_IN_CHILD(fake().starts = false,
                  "Vulkan does not start: vkCreateInstance says VK_ERROR_INCOMPATIBLE_DRIVER; is there a driver?");
  EXPECT_IN_CHILD(fake().devices = 0, "Vulkan is there, but no device");
  for (const char* feature :
       {"bufferDeviceAddress", "scalarBlockLayout", "timelineSemaphore", "shaderInt64", "storageBuffer16BitAccess"})
    EXPECT_IN_CHILD(fake().missing = feature,
                    std::string("no Vulkan device can run the kernels: a fake: it lacks the feature ") + feature);
  EXPECT_IN_CHILD(fake().missing = "1.2", "a fake: it speaks Vulkan 1.1; 1.2 is needed");
  EXPECT_IN_CHILD(fake().missing = "shared", "a fake: it has 16384 bytes of shared memory; 32768 are needed");
  EXPECT_IN_CHILD(fake().computes = false, "a fake: it has no queue for compute work");
  const auto molten = [](unsigned version) { fake().driver = VK_DRIVER_ID_MOLTENVK, fake().driver_version = version; };
  EXPECT_IN_CHILD(molten(10211), "a fake: it is MoltenVK 1.2.11; 1.3.0 is needed");
  EXPECT_IN_CHILD(molten(10300), "^$");
}

// The library's own device is there for good once it can be used, and not before. In a process of its own: it has one.
int devices_left() {
  void* data = nullptr;
  for (long call = 1; call <= 3; ++call) {  // vkCreateDevice, a layout, a cache
    fake().calls = 0, fake().fail_at = call, fake().fail_with = VK_ERROR_OUT_OF_DEVICE_MEMORY;
    if (tessera_vulkan_allocate(0, 64, &data) != TESSERA_OUT_OF_MEMORY || fake().calls != call) return 100;
    if (fake().devices_alive + fake().alive != 0) return static_cast<int>(call);
  }
  fake().fail_at = 0;
  return tessera_vulkan_allocate(0, 64, &data) == TESSERA_OK && fake().devices_alive == 1 ? 0 : 101;
}

TEST_F(FakeVulkanTest, AnOwnDeviceThatCannotBeUsedGoes) {
  EXPECT_EXIT(std::exit(devices_left()), testing::ExitedWithCode(0), "");
}

TEST_F(FakeVulkanTest, ACallersQueue) {
  tessera_vulkan_queue queue = queue_of(0x100);
  EXPECT_EQ(forward_says(queue), "");
  EXPECT_EQ(fake().submissions, 1);
  queue.semaphore = 0x77, queue.value = 5;
  EXPECT_EQ(forward_says(queue), "");
  EXPECT_EQ(queue.value, 6U);
  EXPECT_EQ(tessera_vulkan_release(&queue), TESSERA_OK);
  EXPECT_EQ(fake().alive, 0) << "something was left behind";

  queue.queue_family = 0;
  EXPECT_EQ(forward_says(queue),
            "stream: queue_family is 0; must be one of the device's 3 families, and one that takes compute work");
  queue.queue_family = 9;
  EXPECT_EQ(forward_says(queue),
            "stream: queue_family is 9; must be one of the device's 3 families, and one that takes compute work");
  queue.queue = nullptr;
  EXPECT_EQ(forward_says(queue), "stream: queue is NULL; it is required");
  queue.size = 3;
  EXPECT_EQ(forward_says(queue),
            "stream: size is 3; must be that of a tessera_vulkan_queue, 64: call tessera_vulkan_queue_init before "
            "filling it in");
  EXPECT_EQ(tessera_vulkan_release(nullptr), TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(fake().submissions, 2);
  EXPECT_EQ(fake().alive, 0);
}

// Queues of one device may be of several families: commands are recorded for the one that they go to.
TEST_F(FakeVulkanTest, QueuesOfTwoFamilies) {
  tessera_vulkan_queue queue = queue_of(0x400);
  for (const std::uint32_t family : {1U, 2U, 1U}) {
    queue.queue_family = family;
    EXPECT_EQ(forward_says(queue), "");
    EXPECT_EQ(fake().family, family);
  }
  queue.queue_family = 0;
  EXPECT_EQ(forward_says(queue),
            "stream: queue_family is 0; must be one of the device's 3 families, and one that takes compute work");
  EXPECT_EQ(fake().submissions, 3);
  EXPECT_EQ(tessera_vulkan_release(&queue), TESSERA_OK);
  EXPECT_EQ(fake().alive, 0) << "something was left behind";
}

// No rows, no dispatches, and so no parameters to copy; the semaphore is told all the same.
TEST_F(FakeVulkanTest, ACallWithoutRows) {
  tessera_vulkan_queue queue = queue_of(0x500);
  queue.semaphore = 0x77, queue.value = 5;
  EXPECT_EQ(forward_says(queue, Type::f32, nullptr, 0), "");
  EXPECT_EQ(forward_says(queue), "");
  EXPECT_EQ(forward_says(queue, Type::f32, nullptr, 0), "");
  EXPECT_EQ(queue.value, 8U);
  EXPECT_EQ(fake().submissions, 3);
  EXPECT_EQ(fake().wrong_copies, 0);
  EXPECT_EQ(tessera_vulkan_release(&queue), TESSERA_OK);
}

// Parameters of work that is under way keep their memory; later calls take that of work that is done.
TEST_F(FakeVulkanTest, ParametersOfWorkUnderWay) {
  tessera_vulkan_queue queue = queue_of(0x600);
  queue.semaphore = 0x77;
  fake().pending = true;
  std::set<unsigned long> places;
  for (int n = 0; n < 3; ++n) {
    EXPECT_EQ(forward_says(queue), "");
    places.insert(fake().parameters);
  }
  EXPECT_EQ(places.size(), 3U);
  const long alive = fake().alive;
  fake().pending = false;
  EXPECT_EQ(forward_says(queue), "");
  EXPECT_TRUE(places.contains(fake().parameters));
  EXPECT_EQ(fake().alive, alive);
  EXPECT_EQ(tessera_vulkan_release(&queue), TESSERA_OK);
  EXPECT_EQ(fake().alive, 0) << "something was left behind";
}

// Pipelines are kept in the user's folder, one entry for a device and driver, and found there by the next process.
TEST_F(FakeVulkanTest, PipelinesInTheUsersFolder) {
  const std::filesystem::path folder = testing::TempDir() + "vulkan_pipelines_" + std::to_string(getpid());
  const auto begins_with = [](unsigned driver_version) {
    fake().driver_version = driver_version;
    tessera_vulkan_queue queue = queue_of(0x700);
    EXPECT_EQ(forward_says(queue), "");
    EXPECT_EQ(tessera_vulkan_release(&queue), TESSERA_OK);
    return fake().cached;
  };
  setenv("TESSERA_CACHE", folder.c_str(), 1);
  EXPECT_EQ(begins_with(1), 0U);
  EXPECT_EQ(begins_with(1), 32U);
  EXPECT_EQ(begins_with(2), 0U) << "of another driver";
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder), {}), 2);
  std::filesystem::permissions(folder, std::filesystem::perms::all);
  EXPECT_EQ(begins_with(1), 0U) << "anybody may have written it";
  setenv("TESSERA_CACHE", "", 1);
  EXPECT_EQ(begins_with(1), 0U);
  std::filesystem::remove_all(folder);
}

// What vk_matrix asks a device for; what is missing is named, and nothing is submitted.
TEST_F(FakeVulkanTest, CooperativeMatrices) {
  const auto says = [](Type type = Type::f16) {
    fake().submissions = 0;
    tessera_vulkan_queue queue = queue_of(0x300);
    std::string said = forward_says(queue, type, "vk_matrix");
    EXPECT_EQ(fake().submissions, said.empty() ? 1 : 0);
    EXPECT_EQ(tessera_vulkan_release(&queue), TESSERA_OK);
    EXPECT_EQ(fake().alive, 0) << "something was left behind";
    const std::string planned = "no kernel can run this: vk_matrix: ";  // not where a plan for another device was kept
    return said.starts_with(planned) ? said.substr(planned.size()) : said;
  };
  const std::string begin = "the device cannot: ", end = "; vk_tiled needs none of it";
  EXPECT_EQ(says(), begin + "it lacks the extension VK_KHR_cooperative_matrix" + end);
  fake().matrices = true;
  EXPECT_EQ(says(), "");
  EXPECT_EQ(says(Type::bf16), begin + "it lacks the extension VK_KHR_shader_bfloat16" + end);
  EXPECT_EQ(says(Type::f32), "the type is f32; vk_matrix takes f16 and bf16, vk_tiled all three");
  fake().missing = "VK_EXT_subgroup_size_control";
  EXPECT_EQ(says(), begin + "it lacks the extension VK_EXT_subgroup_size_control" + end);
  for (const char* feature : {"cooperativeMatrix", "computeFullSubgroups", "vulkanMemoryModel", "shaderFloat16"}) {
    fake().missing = feature;
    EXPECT_EQ(says(), begin + "it lacks the feature " + feature + end);
  }
  fake().missing = "vote";
  EXPECT_EQ(says(), begin + "its subgroups cannot vote and shuffle" + end);
  fake().missing = "", fake().lanes = 128;
  EXPECT_EQ(says(),
            begin + "its subgroups have 128 invocations; vk_matrix takes 4, 8, 16, 32 or 64, and eight of them" + end);
  fake().lanes = 32, fake().widest = 128;
  EXPECT_EQ(says(),
            begin + "its subgroups have 32 invocations; vk_matrix takes 4, 8, 16, 32 or 64, and eight of them" + end);
  fake().widest = 1024, fake().lanes = 64, fake().shape[0] = 32;
  EXPECT_EQ(says(), begin +
                        "its cooperative matrices with f16 operands are of 32x16x16; vk_matrix takes M and N that " +
                        "divide 16, N from 8 on, and K of 8, 16 or 32" + end);
  fake().shape[0] = 8;
  EXPECT_EQ(says(), "");
}

TEST_F(FakeVulkanTest, EveryCallFailsInTurn) {
  const struct {
    VkResult result;
    const char* words;
  } failures[] = {{VK_ERROR_DEVICE_LOST, " failed: VK_ERROR_DEVICE_LOST"},
                  {VK_ERROR_OUT_OF_DEVICE_MEMORY, " failed: VK_ERROR_OUT_OF_DEVICE_MEMORY"}};
  for (const auto& failure : failures) {
    long failed = 0;
    for (long n = 1;; ++n) {
      fake() = {};
      fake().fail_at = n, fake().fail_with = failure.result;
      tessera_vulkan_queue queue = queue_of(0x200);
      const std::string said = forward_says(queue);
      const bool reached = fake().calls >= n;
      if (reached) {
        EXPECT_NE(said.find(failure.words), std::string::npos) << "call " << n << ": " << said;
        ++failed;
      }
      EXPECT_LE(fake().submissions, 1);
      fake().fail_at = 0;
      EXPECT_EQ(forward_says(queue), "") << "after call " << n << " failed";
      EXPECT_EQ(tessera_vulkan_release(&queue), TESSERA_OK);
      EXPECT_EQ(fake().alive, 0) << "after call " << n << " failed, something was left behind";
      if (!reached) break;
    }
    EXPECT_GE(failed, 12);
  }
}

TEST_F(FakeVulkanTest, MemoryThatRunsOut) {
  void* first = nullptr;
  ASSERT_EQ(tessera_vulkan_allocate(0, 64, &first), TESSERA_OK) << tessera_last_error();  // the device is there now
  const long alive = fake().alive;
  for (long n = 1; n <= 3; ++n) {
    fake().calls = 0, fake().fail_at = n, fake().fail_with = VK_ERROR_OUT_OF_DEVICE_MEMORY;
    void* data = &first;
    EXPECT_EQ(tessera_vulkan_allocate(0, 1000, &data), TESSERA_OUT_OF_MEMORY) << n;
    EXPECT_EQ(data, nullptr);
    EXPECT_NE(std::string(tessera_last_error()).find("VK_ERROR_OUT_OF_DEVICE_MEMORY"), std::string::npos);
    EXPECT_EQ(fake().alive, alive);
  }
  fake().fail_at = 0;
  for (const std::size_t bytes : {SIZE_MAX, SIZE_MAX - 14, (std::size_t{1} << 40) + 1}) {
    void* data = &first;
    EXPECT_EQ(tessera_vulkan_allocate(0, bytes, &data), TESSERA_OUT_OF_MEMORY) << bytes;
    EXPECT_EQ(tessera_last_error(), "a buffer of " + std::to_string(bytes) +
                                        " bytes is asked for; the device's largest heap has 1099511627776");
    EXPECT_EQ(data, nullptr);
  }
  char host[64] = {};
  EXPECT_EQ(tessera_vulkan_upload(0, first, host, 64), TESSERA_OK) << tessera_last_error();  // staged: see the fake
  EXPECT_EQ(fake().memory_type, 2U) << "the host's reads go past its caches";
  EXPECT_EQ(tessera_vulkan_download(0, host, first, 64), TESSERA_OK) << tessera_last_error();
  EXPECT_EQ(fake().submissions, 2);
  EXPECT_EQ(tessera_vulkan_upload(0, static_cast<char*>(first) + 1, host, 64), TESSERA_INVALID_ARGUMENT);
  EXPECT_STREQ(tessera_last_error(), "data: 64 bytes from there on are not inside one allocation of this device");
  EXPECT_EQ(tessera_vulkan_upload(0, first, nullptr, 64), TESSERA_INVALID_ARGUMENT);
  EXPECT_STREQ(tessera_last_error(), "host: is NULL but bytes is 64; it is required");
  EXPECT_EQ(tessera_vulkan_free(0, static_cast<char*>(first) + 16), TESSERA_INVALID_ARGUMENT);
  EXPECT_STREQ(tessera_last_error(), "data: is not the beginning of an allocation of this device");
  EXPECT_EQ(tessera_vulkan_allocate(4, 1, &first), TESSERA_INVALID_ARGUMENT);
  EXPECT_STREQ(tessera_last_error(), "device: is vulkan:4 but this machine has 1 Vulkan device");
}

}  // namespace
}  // namespace tessera::test
