// SPDX-License-Identifier: Apache-2.0
// Asks a device for its cooperative matrices; see matrix_facts.hpp.
#include "vulkan/matrix_facts.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "core/failure.hpp"

namespace tessera::vulkan {
namespace {

constexpr const char* matrix_extension = "VK_KHR_cooperative_matrix";
constexpr const char* brain_extension = "VK_KHR_shader_bfloat16";
constexpr const char* subgroup_extension = "VK_EXT_subgroup_size_control";

// Numbers of the two extensions; see MatrixFeatures for why they stand here.
constexpr auto matrix_features_type = static_cast<VkStructureType>(1000506000);
constexpr auto matrix_shape_type = static_cast<VkStructureType>(1000506001);
constexpr auto brain_features_type = static_cast<VkStructureType>(1000141000);
constexpr std::int32_t component_f16 = 0, component_f32 = 1, component_bf16 = 1000141000, subgroup_scope = 3;

struct ListedShape {  // VkCooperativeMatrixPropertiesKHR
  VkStructureType type;
  void* next;
  std::uint32_t m, n, k;
  std::int32_t a, b, c, result;
  VkBool32 saturates;
  std::int32_t scope;
};
#ifdef VK_KHR_cooperative_matrix
static_assert(sizeof(ListedShape) == sizeof(VkCooperativeMatrixPropertiesKHR) &&
              offsetof(ListedShape, scope) == offsetof(VkCooperativeMatrixPropertiesKHR, scope) &&
              matrix_shape_type == VK_STRUCTURE_TYPE_COOPERATIVE_MATRIX_PROPERTIES_KHR &&
              matrix_features_type == VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_COOPERATIVE_MATRIX_FEATURES_KHR);
#endif
#ifdef VK_KHR_shader_bfloat16
static_assert(brain_features_type == VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_BFLOAT16_FEATURES_KHR &&
              component_bf16 == VK_COMPONENT_TYPE_BFLOAT16_KHR);
#endif
using ListShapes = VkResult(VKAPI_PTR*)(VkPhysicalDevice, std::uint32_t*, ListedShape*);

std::vector<VkExtensionProperties> extensions_of(const InstanceFunctions& f, VkPhysicalDevice physical) {
  std::uint32_t count = 0;
  if (f.EnumerateDeviceExtensionProperties(physical, nullptr, &count, nullptr) != VK_SUCCESS) return {};
  std::vector<VkExtensionProperties> all(count);
  if (f.EnumerateDeviceExtensionProperties(physical, nullptr, &count, all.data()) != VK_SUCCESS) return {};
  all.resize(count);
  return all;
}

bool lists(const std::vector<VkExtensionProperties>& extensions, const char* name) {
  return std::ranges::any_of(extensions, [&](const auto& e) { return std::strcmp(e.extensionName, name) == 0; });
}

std::vector<ListedShape> shapes_of(const InstanceFunctions& f, VkPhysicalDevice physical) {
  const auto list = reinterpret_cast<ListShapes>(f.list_matrix_shapes);
  std::uint32_t count = 0;
  if (!list || list(physical, &count, nullptr) != VK_SUCCESS) return {};
  std::vector<ListedShape> all(count);
  for (ListedShape& shape : all) shape = {}, shape.type = matrix_shape_type;
  if (list(physical, &count, all.data()) != VK_SUCCESS) return {};
  all.resize(count);
  return all;
}

// The shape for operands of a type, or why there is none.
MatrixKind kind_of(const std::vector<ListedShape>& all, std::int32_t component, const char* type) {
  std::vector<MatrixShape> fitting;
  for (const ListedShape& s : all)
    if (s.a == component && s.b == component && s.c == component_f32 && s.result == component_f32 &&
        s.scope == subgroup_scope)
      fitting.push_back(
          {static_cast<std::int32_t>(s.m), static_cast<std::int32_t>(s.n), static_cast<std::int32_t>(s.k)});
  const MatrixShape best = best_shape(fitting);
  if (best != MatrixShape{}) return {best, ""};
  if (fitting.empty()) return {{}, text("its cooperative matrices have no ", type, " operands with f32 sums")};
  std::string sizes;
  for (const MatrixShape& s : fitting) sizes += text(sizes.empty() ? "" : ", ", s.m, "x", s.n, "x", s.k);
  return {{},
          text("its cooperative matrices with ", type, " operands are of ", sizes,
               "; vk_matrix takes M and N that divide 16, N from 8 on, and K of 8, 16 or 32")};
}

}  // namespace

MatrixShape best_shape(const std::vector<MatrixShape>& listed) {
  MatrixShape best;
  for (const MatrixShape& s : listed)
    if (s.m >= 4 && s.n >= 8 && s.k >= 8 && 16 % s.m == 0 && 16 % s.n == 0 && 32 % s.k == 0 &&
        s.m * s.n * s.k > best.m * best.n * best.k)
      best = s;
  return best;
}

MatrixFacts matrix_facts(const InstanceFunctions& f, VkPhysicalDevice physical) {
  auto driver = of_type<VkPhysicalDeviceDriverProperties>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_DRIVER_PROPERTIES);
  auto subgroup =
      of_type<VkPhysicalDeviceSubgroupProperties>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_PROPERTIES, &driver);
  auto properties = of_type<VkPhysicalDeviceProperties2>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2, &subgroup);
  f.GetPhysicalDeviceProperties2(physical, &properties);
  MatrixFacts facts;
  facts.lanes = static_cast<std::int32_t>(subgroup.subgroupSize);
  facts.lockstep = driver.driverID == VK_DRIVER_ID_MESA_LLVMPIPE;

  const auto none = [&](const std::string& reason) {
    facts.f16.missing = facts.bf16.missing = reason;
    return facts;
  };
  const auto extensions = extensions_of(f, physical);
  for (const char* name : {matrix_extension, subgroup_extension})
    if (!lists(extensions, name)) return none(text("it lacks the extension ", name));
  const bool has_brain = lists(extensions, brain_extension);
  MatrixFeatures::CooperativeMatrix matrices{matrix_features_type, nullptr, VK_FALSE, VK_FALSE};
  MatrixFeatures::BrainFloat brain{brain_features_type, &matrices, VK_FALSE, VK_FALSE, VK_FALSE};
  auto sizes = of_type<VkPhysicalDeviceSubgroupSizeControlFeatures>(
      VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_FEATURES,
      has_brain ? static_cast<void*>(&brain) : static_cast<void*>(&matrices));
  auto features12 =
      of_type<VkPhysicalDeviceVulkan12Features>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES, &sizes);
  auto features = of_type<VkPhysicalDeviceFeatures2>(VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2, &features12);
  f.GetPhysicalDeviceFeatures2(physical, &features);
  const std::pair<const char*, VkBool32> needed[] = {{"cooperativeMatrix", matrices.cooperative_matrix},
                                                     {"computeFullSubgroups", sizes.computeFullSubgroups},
                                                     {"vulkanMemoryModel", features12.vulkanMemoryModel}};
  for (const auto& [name, there] : needed)
    if (!there) return none(text("it lacks the feature ", name));
  const VkSubgroupFeatureFlags wanted =
      VK_SUBGROUP_FEATURE_BASIC_BIT | VK_SUBGROUP_FEATURE_VOTE_BIT | VK_SUBGROUP_FEATURE_SHUFFLE_BIT;
  if ((subgroup.supportedOperations & wanted) != wanted || !(subgroup.supportedStages & VK_SHADER_STAGE_COMPUTE_BIT))
    return none("its subgroups cannot vote and shuffle");
  const std::int32_t lanes = facts.lanes;
  const VkPhysicalDeviceLimits& limits = properties.properties.limits;
  const auto most = static_cast<std::int32_t>(
      std::min({limits.maxComputeWorkGroupInvocations, limits.maxComputeWorkGroupSize[0], 4096U}));
  if (lanes < 4 || lanes > 64 || (lanes & (lanes - 1)) != 0 || 8 * lanes > most)
    return none(
        text("its subgroups have ", lanes, " invocations; vk_matrix takes 4, 8, 16, 32 or 64, and eight of them"));
  const std::vector<ListedShape> all = shapes_of(f, physical);
  facts.f16 = kind_of(all, component_f16, "f16");
  if (facts.f16.missing.empty() && !features12.shaderFloat16) facts.f16 = {{}, "it lacks the feature shaderFloat16"};
  if (!has_brain)
    facts.bf16.missing = text("it lacks the extension ", brain_extension);
  else if (!brain.type_there || !brain.cooperative_matrix)
    facts.bf16.missing = "it lacks the feature shaderBFloat16CooperativeMatrix";
  else
    facts.bf16 = kind_of(all, component_bf16, "bf16");
  return facts;
}

MatrixFeatures::MatrixFeatures(const MatrixFacts& facts) :
    f16(facts.f16.missing.empty()), bf16(facts.bf16.missing.empty()) {}

void MatrixFeatures::add_to(VkPhysicalDeviceVulkan12Features& features12, VkDeviceCreateInfo& info,
                            std::vector<const char*>& extensions) {
  if (!f16 && !bf16) return;
  features12.vulkanMemoryModel = VK_TRUE;
  features12.shaderFloat16 = f16;
  extensions.insert(extensions.end(), {matrix_extension, subgroup_extension});
  matrices = {matrix_features_type, const_cast<void*>(info.pNext), VK_TRUE, VK_FALSE};
  subgroups = of_type<VkPhysicalDeviceSubgroupSizeControlFeatures>(
      VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_FEATURES, &matrices);
  subgroups.computeFullSubgroups = VK_TRUE;
  info.pNext = &subgroups;
  if (bf16) {
    extensions.push_back(brain_extension);
    brain = {brain_features_type, &subgroups, VK_TRUE, VK_FALSE, VK_TRUE};
    info.pNext = &brain;
  }
}

}  // namespace tessera::vulkan
