// SPDX-License-Identifier: Apache-2.0
// Calls on a Vulkan device: the same bits in every run and in every batch, a device and queue of the caller's with a
// timeline semaphore, threads that call together, a plan's text, and no Vulkan kernel for other tensors.
// Uses src/vulkan's loader to be such a caller. Implements docs/vulkan.md, "Devices and memory".
#include <stdexcept>
#include <thread>

#include "cases/device.hpp"
#include "tests/vulkan/support.hpp"
#include "vulkan/device.hpp"
#include "vulkan/plan.hpp"

namespace tessera::test {
namespace {

Case small_case() {
  Case c{.name = "small"};
  c.B = 2, c.Nq = 70, c.Nk = 90, c.Hq = 4, c.Hk = 2, c.D = 40, c.type = Type::f16;
  c.options.causal = true, c.options.dropout = 0.25, c.options.seed = 5;
  return c;
}

// Forward and backward of a built case, with a workspace of its own.
void run_on_vulkan(CaseData& data, void* stream = nullptr, const char* kernel = "vk_tiled") {
  Placed placed(data, vulkan_device);
  placed.upload();
  Execution execution{.device = vulkan_device, .stream = stream, .kernel = kernel};
  forward(placed.inputs(), placed.outputs(), data.options(), execution);
  const Plan plan = Plan::backward(placed.inputs(), placed.saved(), placed.gradients(), data.options(), execution);
  const DeviceMemory workspace(vulkan_device, plan.workspace_size());
  execution.workspace = workspace.data(), execution.workspace_bytes = workspace.size();
  plan.run(placed.inputs(), placed.saved(), placed.gradients(), data.options(), execution);
  placed.download();
}

void expect_same_results(const CaseData& a, const CaseData& b, const std::string& what) {
  expect_same_bits(a.o, b.o, what + ": o");
  expect_same_bits(a.lse, b.lse, what + ": lse");
  expect_same_bits(a.dq, b.dq, what + ": dq");
  expect_same_bits(a.dk, b.dk, what + ": dk");
  expect_same_bits(a.dv, b.dv, what + ": dv");
}

class VulkanCalls : public Vulkan {};

// vk_matrix among them where the device has f16 matrices.
std::vector<const char*> kernels_here() {
  std::vector<const char*> names{"vk_tiled", "vk_naive"};
  if (vulkan::own_device(0).facts().matrices.f16.missing.empty()) names.push_back("vk_matrix");
  return names;
}

TEST_F(VulkanCalls, TheSameBitsInEveryRunAndFromEveryThread) {
  for (const char* kernel : kernels_here()) {
    CaseData first = build(small_case());
    run_on_vulkan(first, nullptr, kernel);
    std::vector<CaseData> others;
    for (int n = 0; n < 3; ++n) others.push_back(build(small_case()));
    std::vector<std::thread> threads;
    for (CaseData& data : others) threads.emplace_back([&] { run_on_vulkan(data, nullptr, kernel); });
    for (std::thread& thread : threads) thread.join();
    for (const CaseData& data : others) expect_same_results(first, data, kernel);
  }
}

void expect_batch_invariance(const char* kernel) {
  Case c = small_case();
  c.options.dropout = 0, c.options.seed = 0;
  CaseData both = build(c);
  run_on_vulkan(both, nullptr, kernel);
  c.B = 1;
  CaseData one = build(c);  // the generator fills tensors in order: q differs, so it is copied
  const auto copy = [](const Buffer& from, Buffer& to) {
    for (std::int64_t e = 0; e < to.elements(); ++e) to.set(e, from.get(e));
  };
  copy(both.q, one.q), copy(both.k, one.k), copy(both.v, one.v), copy(both.d_o, one.d_o);
  run_on_vulkan(one, nullptr, kernel);
  const std::pair<const Buffer*, const Buffer*> results[] = {
      {&both.o, &one.o}, {&both.lse, &one.lse}, {&both.dq, &one.dq}, {&both.dk, &one.dk}, {&both.dv, &one.dv}};
  for (const auto& [many, single] : results)
    for (std::int64_t e = 0; e < single->elements(); ++e) ASSERT_EQ(many->get(e), single->get(e)) << kernel << " " << e;
}

TEST_F(VulkanCalls, ASequenceKeepsItsBitsInAnyBatch) {
  for (const char* kernel : kernels_here()) expect_batch_invariance(kernel);
}

TEST_F(VulkanCalls, PlansSayWhatRuns) {
  const CaseData data = build(small_case());
  const Placed placed(const_cast<CaseData&>(data), vulkan_device);
  const Plan plan =
      Plan::backward(placed.inputs(), placed.saved(), placed.gradients(), data.options(), {.device = vulkan_device});
  EXPECT_EQ(plan.kernel(), "vk_tiled");
  EXPECT_NE(plan.describe().find("backward of keys"), std::string::npos) << plan.describe();
  EXPECT_NE(plan.describe().find("not vk_naive   could run it, but is slower"), std::string::npos) << plan.describe();
  EXPECT_EQ(plan.describe().find("hopper"), std::string::npos) << "no word of other devices' kernels";
  const std::string missing = vulkan::own_device(0).facts().matrices.f16.missing;
  const std::string reason =
      missing.empty() ? "not all tests of this kernel have ended on a GPU yet; a call gets it if it asks for it by name"
                      : "the device cannot: " + missing + "; vk_tiled needs none of it";
  EXPECT_NE(plan.describe().find("not vk_matrix  refused: " + reason), std::string::npos) << plan.describe();
  try {
    forward(data.inputs(), data.outputs(), data.options(), {.kernel = "vk_tiled"});
    ADD_FAILURE() << "a Vulkan kernel took tensors of the CPU";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "no kernel can run this: vk_tiled: device is cpu; this kernel runs on vulkan");
  }
}

// llvmpipe ends long loops and says nothing, so plans count rounds: what they let through is computed to its last key.
TEST_F(VulkanCalls, LoopsEndAfterTheLastKey) {
  const std::pair<const char*, std::int64_t> longest[] = {{"vk_tiled", 4200}, {"vk_naive", 20500}};
  for (const auto& [kernel, keys] : longest) {
    Case c{.name = "many keys"};
    c.B = 1, c.Nq = 1, c.Nk = keys, c.Hq = 1, c.Hk = 1, c.D = 64, c.options.dropout = 0.25;
    const CaseReport report = run_case(c, Execution{.device = vulkan_device, .kernel = kernel});
    expect_ok(report);
    EXPECT_FALSE(report.skipped) << kernel;
  }
}

// A device that the library did not make, as a program with Vulkan code of its own has it.
class CallersDevice {
 public:
  CallersDevice() : f(vulkan::instance_functions(vulkan::find_loader().instance)) {
    std::uint32_t count = 1;
    f.EnumeratePhysicalDevices(vulkan::find_loader().instance, &count, &physical);
    const float priority = 1;
    auto queue = vulkan::of_type<VkDeviceQueueCreateInfo>(VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO);
    queue.queueCount = 1, queue.pQueuePriorities = &priority;
    auto features11 =
        vulkan::of_type<VkPhysicalDeviceVulkan11Features>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES);
    features11.storageBuffer16BitAccess = VK_TRUE;
    auto features12 = vulkan::of_type<VkPhysicalDeviceVulkan12Features>(
        VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES, &features11);
    features12.bufferDeviceAddress = features12.scalarBlockLayout = features12.timelineSemaphore = VK_TRUE;
    auto features =
        vulkan::of_type<VkPhysicalDeviceFeatures2>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2, &features12);
    features.features.shaderInt64 = VK_TRUE;
    auto info = vulkan::of_type<VkDeviceCreateInfo>(VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO, &features);
    info.queueCreateInfoCount = 1, info.pQueueCreateInfos = &queue;
    vulkan::check(f.CreateDevice(physical, &info, nullptr, &device), "vkCreateDevice");
    d = vulkan::device_functions(f, device);
    auto timeline = vulkan::of_type<VkSemaphoreTypeCreateInfo>(VK_STRUCTURE_TYPE_SEMAPHORE_TYPE_CREATE_INFO);
    timeline.semaphoreType = VK_SEMAPHORE_TYPE_TIMELINE, timeline.initialValue = 3;
    const auto made = vulkan::of_type<VkSemaphoreCreateInfo>(VK_STRUCTURE_TYPE_SEMAPHORE_CREATE_INFO, &timeline);
    vulkan::check(function<PFN_vkCreateSemaphore>("vkCreateSemaphore")(device, &made, nullptr, &semaphore),
                  "semaphore");
    buffer_info = vulkan::of_type<VkBufferCreateInfo>(VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO);
    buffer_info.size = bytes;
    buffer_info.usage = VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT;
    vulkan::check(d.CreateBuffer(device, &buffer_info, nullptr, &buffer), "buffer");
    auto flags = vulkan::of_type<VkMemoryAllocateFlagsInfo>(VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_FLAGS_INFO);
    flags.flags = VK_MEMORY_ALLOCATE_DEVICE_ADDRESS_BIT;
    auto allocation = vulkan::of_type<VkMemoryAllocateInfo>(VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO, &flags);
    VkMemoryRequirements needs{};
    d.GetBufferMemoryRequirements(device, buffer, &needs);
    allocation.allocationSize = needs.size, allocation.memoryTypeIndex = mappable(needs.memoryTypeBits);
    vulkan::check(d.AllocateMemory(device, &allocation, nullptr, &memory), "memory");
    vulkan::check(d.BindBufferMemory(device, buffer, memory, 0), "bind");
    void* seen = nullptr;
    vulkan::check(d.MapMemory(device, memory, 0, VK_WHOLE_SIZE, 0, &seen), "map");
    mapped = static_cast<float*>(seen);
    auto address_info = vulkan::of_type<VkBufferDeviceAddressInfo>(VK_STRUCTURE_TYPE_BUFFER_DEVICE_ADDRESS_INFO);
    address_info.buffer = buffer;
    address = d.GetBufferDeviceAddress(device, &address_info);
    tessera_vulkan_queue_init(&queue_struct);
    VkQueue handle = VK_NULL_HANDLE;
    d.GetDeviceQueue(device, 0, 0, &handle);
    queue_struct.instance = vulkan::find_loader().instance, queue_struct.physical_device = physical;
    queue_struct.device = device, queue_struct.queue = handle;
    queue_struct.semaphore = reinterpret_cast<std::uint64_t>(semaphore), queue_struct.value = 3;
  }
  ~CallersDevice() {
    d.DestroyBuffer(device, buffer, nullptr);
    d.FreeMemory(device, memory, nullptr);
    function<PFN_vkDestroySemaphore>("vkDestroySemaphore")(device, semaphore, nullptr);
    function<PFN_vkDestroyDevice>("vkDestroyDevice")(device, nullptr);  // the layers say what was left on it
  }
  template <class Function>
  Function function(const char* name) const {
    return reinterpret_cast<Function>(f.GetDeviceProcAddr(device, name));
  }
  // The first type of memory among these that the host can see: a GPU with memory of its own has others.
  std::uint32_t mappable(std::uint32_t types) const {
    constexpr VkMemoryPropertyFlags seen = VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;
    VkPhysicalDeviceMemoryProperties memories;
    f.GetPhysicalDeviceMemoryProperties(physical, &memories);
    for (std::uint32_t n = 0; n < memories.memoryTypeCount; ++n)
      if ((types >> n & 1) && (memories.memoryTypes[n].propertyFlags & seen) == seen) return n;
    throw std::runtime_error("no memory for buffers that the host can see");
  }
  void wait(std::uint64_t value) const {
    auto info = vulkan::of_type<VkSemaphoreWaitInfo>(VK_STRUCTURE_TYPE_SEMAPHORE_WAIT_INFO);
    info.semaphoreCount = 1, info.pSemaphores = &semaphore, info.pValues = &value;
    vulkan::check(function<PFN_vkWaitSemaphores>("vkWaitSemaphores")(device, &info, UINT64_MAX), "vkWaitSemaphores");
  }
  Tensor tensor(std::int64_t part) const {  // [1,40,2,16], the n-th of the buffer
    return Tensor(reinterpret_cast<void*>(address + static_cast<std::uint64_t>(part) * 40 * 2 * 16 * 4), Type::f32,
                  {1, 40, 2, 16}, vulkan_device);
  }

  static constexpr VkDeviceSize bytes = 1 << 16;
  vulkan::InstanceFunctions f;
  vulkan::DeviceFunctions d;
  VkPhysicalDevice physical = VK_NULL_HANDLE;
  VkDevice device = VK_NULL_HANDLE;
  VkSemaphore semaphore = VK_NULL_HANDLE;
  VkBufferCreateInfo buffer_info{};
  VkBuffer buffer = VK_NULL_HANDLE;
  VkDeviceMemory memory = VK_NULL_HANDLE;
  VkDeviceAddress address = 0;
  float* mapped = nullptr;
  tessera_vulkan_queue queue_struct{};
};

TEST_F(VulkanCalls, ACallersQueueAndSemaphore) {
  CallersDevice own;
  constexpr std::int64_t elements = 40 * 2 * 16;
  std::vector<float> host(4 * elements);
  for (std::int64_t e = 0; e < 3 * elements; ++e)
    own.mapped[e] = host[static_cast<std::size_t>(e)] = static_cast<float>(e * 37 % 101) / 50 - 1;
  Inputs in;
  in.q = own.tensor(0), in.k = own.tensor(1), in.v = own.tensor(2);
  for (int n = 0; n < 3; ++n)
    forward(in, {own.tensor(3), {}}, {.causal = true}, {.device = vulkan_device, .stream = &own.queue_struct});
  EXPECT_EQ(own.queue_struct.value, 6U);
  own.wait(6);
  const auto view = [&](std::int64_t part) { return Tensor(host.data() + part * elements, Type::f32, {1, 40, 2, 16}); };
  in.q = view(0), in.k = view(1), in.v = view(2);
  forward(in, {view(3), {}}, {.causal = true});
  for (std::int64_t e = 3 * elements; e < 4 * elements; ++e)
    ASSERT_NEAR(own.mapped[e], host[static_cast<std::size_t>(e)], 1e-6) << e;
  EXPECT_EQ(tessera_vulkan_release(&own.queue_struct), TESSERA_OK);
}

}  // namespace
}  // namespace tessera::test
