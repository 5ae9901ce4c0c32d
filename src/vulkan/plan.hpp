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
};

Steps plan_tiled(const Problem& problem);
Steps plan_naive(const Problem& problem);

// Why a device cannot run the steps, although it has all features; empty: it can.
std::string refusal(const Steps& steps, const Facts& facts);

// The kernels' SPIR-V.
std::span<const Shader> shaders();

}  // namespace tessera::vulkan
