// SPDX-License-Identifier: Apache-2.0
// What a device has of cooperative matrices (VK_KHR_cooperative_matrix, VK_KHR_shader_bfloat16), and what a device must
// be created with so that vk_matrix may use them. Included by src/vulkan and its tests. Implements docs/vulkan.md,
// "vk_matrix".
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "vulkan/loader.hpp"

namespace tessera::vulkan {

// A product that a subgroup computes: m x k times k x n, f32 sums.
struct MatrixShape {
  std::int32_t m = 0, n = 0, k = 0;
  bool operator==(const MatrixShape&) const = default;
};

// `missing` says why there is none for f16 or bf16 operands; it is empty where there is.
struct MatrixKind {
  MatrixShape shape;
  std::string missing;
  bool operator==(const MatrixKind&) const = default;
};
struct MatrixFacts {
  MatrixKind f16, bf16;
  std::int32_t lanes = 0;  // of a subgroup
  bool lockstep = false;   // llvmpipe: see strip_barrier in kernel/matrix.glsl
  // For vk_tiled's tiles: what a workgroup may have there. Not known: what many devices have, until a plan runs.
  bool gpu = false;             // no processor: many invocations are in flight
  bool many_registers = false;  // an invocation may have some 250 of them: GPUs of NVIDIA's and AMD's
  std::int32_t invocations = 1024, shared_bytes = 65536;
  bool operator==(const MatrixFacts&) const = default;
};
MatrixFacts matrix_facts(const InstanceFunctions& functions, VkPhysicalDevice physical);

// The tile takes shapes that divide its strips: the largest product of those listed, the first of equals; {} for none.
MatrixShape best_shape(const std::vector<MatrixShape>& listed);

// Extensions and features for a device of the library's own: those of vk_matrix that the physical device has.
class MatrixFeatures {
 public:
  explicit MatrixFeatures(const MatrixFacts& facts);
  // Sets members of features12 that are wanted, adds the rest of the chain behind `info`'s, and the extensions.
  void add_to(VkPhysicalDeviceVulkan12Features& features12, VkDeviceCreateInfo& info,
              std::vector<const char*>& extensions);
  MatrixFeatures(const MatrixFeatures&) = delete;

 private:
  // Vulkan's headers have had these structs since 1.3.255 and 1.4.311; Debian 12's are older.
  struct CooperativeMatrix {
    VkStructureType type;
    void* next;
    VkBool32 cooperative_matrix, robust_buffer_access;
  };
  struct BrainFloat {
    VkStructureType type;
    void* next;
    VkBool32 type_there, dot_product, cooperative_matrix;
  };
  friend MatrixFacts matrix_facts(const InstanceFunctions&, VkPhysicalDevice);

  bool f16, bf16;
  CooperativeMatrix matrices{};
  BrainFloat brain{};
  VkPhysicalDeviceSubgroupSizeControlFeatures subgroups{};
};

}  // namespace tessera::vulkan
