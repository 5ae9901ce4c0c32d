// SPDX-License-Identifier: Apache-2.0
// The compile gate of the Vulkan kernels: every pipeline compiled by the drivers of GPUs that are not here, and judged
// by what they say of it (VK_KHR_pipeline_executable_properties): registers, spills, scratch memory. Mesa's driver of
// AMD's compiles for any of AMD's GPUs without one (RADV_FORCE_FAMILY); any other device that there is, a real one or
// one that a drm-shim plays, is judged likewise. Nothing is run. Implements docs/vulkan.md, "Compiled, not run".
#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <set>

#include "core/failure.hpp"
#include "tests/vulkan/support.hpp"
#include "vulkan/plan.hpp"

namespace tessera::test {
namespace {

using vulkan::of_type, vulkan::Step;

// A number that the driver gives of one executable of a pipeline, and which executable.
struct Statistic {
  std::string executable, name;
  double value;
};

// An instance of its own: drivers read the environment when it is made.
class Instance {
 public:
  Instance() {
    auto application = of_type<VkApplicationInfo>(VK_STRUCTURE_TYPE_APPLICATION_INFO);
    application.apiVersion = VK_API_VERSION_1_2;
    auto info = of_type<VkInstanceCreateInfo>(VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO);
    info.pApplicationInfo = &application;
    const auto get = vulkan::find_loader().get_proc;
    const auto create = get ? reinterpret_cast<PFN_vkCreateInstance>(get(nullptr, "vkCreateInstance")) : nullptr;
    if (!create || create(&info, nullptr, &instance) != VK_SUCCESS) return;
    destroy = reinterpret_cast<PFN_vkDestroyInstance>(get(instance, "vkDestroyInstance"));
    functions = vulkan::instance_functions(instance);
    std::uint32_t count = 0;
    if (functions.EnumeratePhysicalDevices(instance, &count, nullptr) != VK_SUCCESS) return;
    devices.resize(count);
    functions.EnumeratePhysicalDevices(instance, &count, devices.data());
  }
  ~Instance() {
    if (destroy) destroy(instance, nullptr);
  }
  Instance(const Instance&) = delete;

  VkInstance instance = VK_NULL_HANDLE;
  PFN_vkDestroyInstance destroy = nullptr;
  vulkan::InstanceFunctions functions;
  std::vector<VkPhysicalDevice> devices;
};

// A device that compiles, and tells what came of it.
class Compiler {
 public:
  Compiler(const Instance& from, VkPhysicalDevice physical) :
      facts(vulkan::facts_of(from.functions, physical)), get(from.functions.GetDeviceProcAddr) {
    if (!facts.missing.empty()) return;
    auto executables = of_type<VkPhysicalDevicePipelineExecutablePropertiesFeaturesKHR>(
        VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PIPELINE_EXECUTABLE_PROPERTIES_FEATURES_KHR);
    auto features = of_type<VkPhysicalDeviceFeatures2>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2, &executables);
    from.functions.GetPhysicalDeviceFeatures2(physical, &features);
    tells = executables.pipelineExecutableInfo;
    device = create_device(from.functions, physical, compute_family(from.functions, physical), facts,
                           tells ? VK_KHR_PIPELINE_EXECUTABLE_PROPERTIES_EXTENSION_NAME : nullptr,
                           tells ? &executables : nullptr);
    f = device_functions(from.functions, device);
    layout = make_layout(f, device);
  }
  ~Compiler() {
    if (layout) f.DestroyPipelineLayout(device, layout, nullptr);
    if (device) function<PFN_vkDestroyDevice>("vkDestroyDevice")(device, nullptr);
  }
  Compiler(const Compiler&) = delete;

  std::vector<Statistic> compile(const Step& step) {
    const VkPipeline pipeline = make_pipeline(f, device, layout, VK_NULL_HANDLE, *step.shader, step.constants,
                                              tells ? VK_PIPELINE_CREATE_CAPTURE_STATISTICS_BIT_KHR : 0);
    const std::vector<Statistic> all = tells ? statistics_of(pipeline) : std::vector<Statistic>();
    f.DestroyPipeline(device, pipeline, nullptr);
    return all;
  }

  const vulkan::Facts facts;

 private:
  std::vector<Statistic> statistics_of(VkPipeline pipeline) const {
    std::vector<Statistic> all;
    auto which = of_type<VkPipelineInfoKHR>(VK_STRUCTURE_TYPE_PIPELINE_INFO_KHR);
    which.pipeline = pipeline;
    const auto properties = function<PFN_vkGetPipelineExecutablePropertiesKHR>("vkGetPipelineExecutablePropertiesKHR");
    const auto statistics = function<PFN_vkGetPipelineExecutableStatisticsKHR>("vkGetPipelineExecutableStatisticsKHR");
    std::uint32_t count = 0;
    properties(device, &which, &count, nullptr);
    std::vector<VkPipelineExecutablePropertiesKHR> executables(
        count, of_type<VkPipelineExecutablePropertiesKHR>(VK_STRUCTURE_TYPE_PIPELINE_EXECUTABLE_PROPERTIES_KHR));
    properties(device, &which, &count, executables.data());
    for (std::uint32_t n = 0; n < executables.size(); ++n) {
      auto one = of_type<VkPipelineExecutableInfoKHR>(VK_STRUCTURE_TYPE_PIPELINE_EXECUTABLE_INFO_KHR);
      one.pipeline = pipeline, one.executableIndex = n;
      statistics(device, &one, &count, nullptr);
      std::vector<VkPipelineExecutableStatisticKHR> found(
          count, of_type<VkPipelineExecutableStatisticKHR>(VK_STRUCTURE_TYPE_PIPELINE_EXECUTABLE_STATISTIC_KHR));
      statistics(device, &one, &count, found.data());
      for (const auto& s : found) {
        double value = s.value.f64;
        if (s.format == VK_PIPELINE_EXECUTABLE_STATISTIC_FORMAT_UINT64_KHR) value = static_cast<double>(s.value.u64);
        if (s.format == VK_PIPELINE_EXECUTABLE_STATISTIC_FORMAT_INT64_KHR) value = static_cast<double>(s.value.i64);
        all.push_back({text(executables[n].name, " (subgroups of ", executables[n].subgroupSize, ")"), s.name, value});
      }
    }
    return all;
  }

  template <class Function>
  Function function(const char* name) const {
    return reinterpret_cast<Function>(get(device, name));
  }

  PFN_vkGetDeviceProcAddr get;
  bool tells = false;  // statistics
  VkDevice device = VK_NULL_HANDLE;
  vulkan::DeviceFunctions f;
  VkPipelineLayout layout = VK_NULL_HANDLE;
};

// Whether people want to see it: registers, and memory in their place.
bool is_telling(const std::string& name) {
  for (const char* word : {"GPRs", "egister", "Spill", "Fill", "cratch", "STP", "LDP", "SIMD", "Waves", "LDS", "SLM",
                           "Stack", "Local Memory", "Shared Memory"})
    if (name.find(word) != std::string::npos) return !name.starts_with("Pre-Sched");
  return false;
}

// The pipelines that calls of these dims use: each rung, both passes, all options.
std::vector<Step> steps_for(const vulkan::Facts& facts, std::int64_t dims) {
  std::vector<Step> all;
  for (const Type type : {Type::f32, Type::f16, Type::bf16})
    for (const Pass pass : {Pass::forward, Pass::backward})
      for (const auto plan : {vulkan::plan_tiled, vulkan::plan_naive, vulkan::plan_matrix}) {
        Problem p;
        p.pass = pass, p.device = vulkan_device;
        p.q_type = p.k_type = p.v_type = p.o_type = type;
        p.B = 1, p.Nq = p.Nk = 64, p.Hq = p.Hk = 1, p.D = p.Dv = dims;
        p.seqused_k = p.sinks = true, p.bias = Broadcast{type, {1, 1, 64, 64}};
        if (pass == Pass::backward) p.d_o = p.dq = p.dk = p.dv = p.dbias = type, p.dsinks = Type::f32;
        for (Step& step : plan(p, facts.matrices).list) all.push_back(std::move(step));
      }
  return all;
}

// What the driver must say of every pipeline. RADV keeps spilled scalar registers in lanes of vector registers: that
// costs instructions, but no memory, and vk_naive, which is for readers, may have as many as it likes.
struct Rule {
  const char* name;
  double most, most_naive;
};
constexpr Rule radv_rules[] = {{"Spilled VGPRs", 0, 0}, {"Scratch size", 0, 0}, {"Spilled SGPRs", 340, 1e9}};

// The shared memory of vk_tiled's kernels is what the plan counts, which chooses tiles by it; RADV rounds it up. A
// kernel may leave out what it does not use, but the backward pass uses all.
void expect_counted_memory(const Step& step, double bytes, const std::string& what) {
  const std::string name = step.shader->name;
  if (name != "forward" && name != "backward" && name != "bias_gradient") return;
  const auto& c = step.constants;
  const vulkan::TileShape shape{c[4], c[5], c[6], c[7], c[8]};
  const int counted = (shape.shared_bytes() + 511) / 512 * 512;
  EXPECT_LE(bytes, counted) << what;
  EXPECT_GE(bytes, name == "backward" ? counted : 0) << what;
}

// Compiles for calls of these dims, each pipeline once, and prints what the driver says of it.
void judge(const Instance& instance, VkPhysicalDevice physical, const std::vector<std::int64_t>& dims,
           std::span<const Rule> rules) {
  Compiler compiler(instance, physical);
  ASSERT_EQ(compiler.facts.missing, "") << compiler.facts.name;
  std::cout << compiler.facts.name << "\n";
  std::set<std::pair<std::string, vulkan::Constants>> done;
  for (const std::int64_t d : dims)
    for (const Step& step : steps_for(compiler.facts, d)) {
      if (!done.emplace(step.shader->name, step.constants).second) continue;
      const bool is_naive = step.shader->name == std::string("naive");
      const std::string what = text(compiler.facts.name, ", D=", d, ", ", step.shader->name, ": ", step.name);
      const std::vector<Statistic> found = compiler.compile(step);
      std::cout << "D=" << d << " " << step.shader->name << ", " << step.name << ":";
      std::string executable;
      for (const Statistic& s : found) {
        if (s.executable != executable) std::cout << " " << s.executable;
        executable = s.executable;
        if (s.value != 0 && is_telling(s.name)) std::cout << ", " << s.name << " " << s.value;
      }
      std::cout << "\n" << std::flush;
      for (const Rule& rule : rules) {
        const auto statistic = std::ranges::find(found, rule.name, &Statistic::name);
        ASSERT_NE(statistic, found.end()) << what << ": the driver says nothing of " << rule.name;
        EXPECT_LE(statistic->value, is_naive ? rule.most_naive : rule.most) << what << ": " << rule.name;
      }
      const auto memory = std::ranges::find(found, "LDS size", &Statistic::name);
      if (memory != found.end()) expect_counted_memory(step, memory->value, what);
      EXPECT_TRUE(rules.empty() || memory != found.end() || is_naive) << what << ": no word of its shared memory";
    }
  ASSERT_GE(done.size(), 10U);
}

// Mesa's driver of AMD's, playing that it has a GPU of this family. The newest do so with a drm-shim alone. The other
// families and dims are for those who have a minute.
std::vector<std::int64_t> dims_here() {
  if (std::getenv("TESSERA_COMPILE_ALL")) return {64, 128, 256};
  return {64, 128};
}
std::vector<const char*> families_here() {
  if (std::getenv("TESSERA_COMPILE_ALL")) return {"VEGA10", "VEGA20", "NAVI10", "NAVI14", "NAVI21", "NAVI24"};
  return {"NAVI21"};
}
class CompiledForAMD : public VulkanWith<const char*> {};

TEST_P(CompiledForAMD, WithoutScratchMemory) {
  setenv("RADV_FORCE_FAMILY", GetParam(), 1);
  const Instance instance;
  unsetenv("RADV_FORCE_FAMILY");
  const std::string name = text("RADV ", GetParam());
  const auto found = std::ranges::find_if(instance.devices, [&](VkPhysicalDevice device) {
    return vulkan::facts_of(instance.functions, device).name.find(name) != std::string::npos;
  });
  if (found == instance.devices.end()) GTEST_SKIP() << "no driver here compiles for " << GetParam() << " without it";
  judge(instance, *found, dims_here(), radv_rules);
}

INSTANTIATE_TEST_SUITE_P(All, CompiledForAMD, testing::ValuesIn(families_here()));

// Subgroups have 4 to 128 invocations, as devices and drivers like. Kernels without matrices must not notice: a module
// that asks for no capability of subgroups has no instruction of theirs, and cannot read their size.
TEST(SubgroupsOf, VkTiledAndVkNaiveAreNobodysBusiness) {
  constexpr std::uint32_t op_capability = 17, first_of_groups = 61, last_of_groups = 68;
  std::size_t without = 0;
  for (const vulkan::Shader& shader : vulkan::shaders()) {
    bool uses = false;
    for (std::size_t at = 5; at < shader.code.size() && (shader.code[at] & 0xffff) == op_capability; at += 2)
      uses |= first_of_groups <= shader.code[at + 1] && shader.code[at + 1] <= last_of_groups;
    EXPECT_EQ(uses, shader.full_subgroups) << shader.name;
    without += !uses;
  }
  EXPECT_EQ(without, 5U);
}

// Whatever else is here but processors. How much a driver spills is shown, and not judged.
TEST_F(Vulkan, CompiledForEveryGPUHere) {
  const Instance instance;
  bool any = false;
  for (VkPhysicalDevice device : instance.devices) {
    auto properties = of_type<VkPhysicalDeviceProperties2>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2);
    instance.functions.GetPhysicalDeviceProperties2(device, &properties);
    if (properties.properties.deviceType == VK_PHYSICAL_DEVICE_TYPE_CPU) continue;
    any = true;
    judge(instance, device, dims_here(), {});
  }
  if (!any) GTEST_SKIP() << "no GPU is here; docs/vulkan.md says how drivers compile without one";
}

}  // namespace
}  // namespace tessera::test
