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

// Facts are those of the device that is to run it; vk_naive does not ask for them.
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

// The tile of vk_tiled forward: invocations along its rows and its columns, each of which has so many rows and four
// columns of the scores, and dims of an operand that are in shared memory at a time. Tests take one that is not their
// device's. Not for use while others plan; null: no more.
struct TileShape {
  std::int32_t row_threads, column_threads, own, depth;
};
// 32 x 32 for processors; 64 x 64 for GPUs, which have more invocations in flight.
inline constexpr TileShape small_tile{8, 8, 4, 64}, wide_tile{16, 16, 4, 32};
void take_tile(const TileShape* shape);

// Why a device cannot run the steps, although it has all features; empty: it can.
std::string refusal(const Steps& steps, const Facts& facts);

// The kernels' SPIR-V.
std::span<const Shader> shaders();

}  // namespace tessera::vulkan
