// SPDX-License-Identifier: Apache-2.0
// Which dispatches answer a problem: plans of the Vulkan kernels as data, made without a device. Included by
// src/vulkan and its tests. Implements docs/vulkan.md, "Rungs".
#pragma once

#include <string>
#include <vector>

#include "core/problem.hpp"
#include "vulkan/device.hpp"

namespace tessera::vulkan {

// One dispatch of a plan.
struct Step {
  std::string name;  // for people: "forward"
  const Shader* shader;
  Constants constants{};
  std::int64_t blocks = 0;
  double rounds = 0;  // of loops that one invocation may make, at most; see Facts::ends_long_loops
};

struct Steps {
  std::vector<Step> list;
  std::string reason;  // why there is no plan: names the option, its value and what would work
  std::string note;    // for people, behind the list; may be empty
};

// Facts are those of the device that is to run it; vk_matrix alone asks for them.
Steps plan_matrix(const Problem& problem, const MatrixFacts& facts);
Steps plan_tiled(const Problem& problem, const MatrixFacts& facts);
Steps plan_naive(const Problem& problem, const MatrixFacts& facts);

// What tests put in the place of cooperative matrices, on devices that have none: the same kernels, compiled with
// matrices of their own. Not for use while others plan.
struct MatrixStandIn {
  Shader forward, backward;
  MatrixShape shape;
};
void stand_in_for_matrices(const MatrixStandIn* stand_in);  // null: no more

// Why a device cannot run the steps, although it has all features; empty: it can.
std::string refusal(const Steps& steps, const Facts& facts);

// The kernels' SPIR-V.
std::span<const Shader> shaders();

}  // namespace tessera::vulkan
