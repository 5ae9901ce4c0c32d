// SPDX-License-Identifier: Apache-2.0
// Which dispatches answer a problem: plans of the Vulkan kernels as data, made without a device. Included by
// src/vulkan and its tests. Implements docs/vulkan.md, "Rungs".
#pragma once

#include <algorithm>
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

// A tile of vk_tiled: invocations along its rows and its columns, each of which has `own` rows and four columns of the
// scores; dims of an operand that are in shared memory at a time; and how many of 32 neighbours lie side by side. As
// kernel/tile.glsl has it.
struct TileShape {
  std::int32_t row_threads, column_threads, own, depth, patch;

  constexpr std::int32_t rows() const { return own * row_threads; }
  constexpr std::int32_t columns() const { return 4 * column_threads; }
  constexpr std::int32_t threads() const { return row_threads * column_threads; }

  // Shared memory, in quads of f32: what kernels have for operands of rows and columns, weights, and outputs, one after
  // another; and for everything, with values of 32 columns, and LSE and delta of the rows.
  constexpr std::int32_t quads() const {
    const std::int32_t operands = (rows() + columns()) * (depth / 4 + 1), outputs = rows() * (chunk / 4 + 1);
    return std::max({operands, outputs, columns() * (rows() / 4 + 1)});
  }
  constexpr std::int32_t shared_bytes() const { return 16 * (quads() + 32 * (chunk / 4 + 1)) + 8 * rows(); }

  bool operator==(const TileShape&) const = default;
  static constexpr std::int32_t chunk = 64;  // dims of sums at a time
};
// 32 x 32 for processors. GPUs have more invocations in flight: 64 x 64 for those with 32 KiB, and 128 x 64 in 44 KiB.
inline constexpr TileShape small_tile{8, 8, 4, 64, 8}, wide_tile{16, 16, 4, 32, 16}, tall_tile{16, 16, 8, 32, 16};
static_assert(small_tile.shared_bytes() <= 32768 && wide_tile.shared_bytes() <= 32768 &&
              tall_tile.shared_bytes() <= 49152);

// The tile for a problem on a device: the one rule for it. `reason`: TESSERA_VULKAN_TILE names one that is none, or
// that the device has no room for.
struct TileChoice {
  TileShape shape;
  std::string reason;
};
TileChoice tile_for(const Problem& problem, const MatrixFacts& facts);

// Why a device cannot run the steps, although it has all features; empty: it can.
std::string refusal(const Steps& steps, const Facts& facts);

// The kernels' SPIR-V.
std::span<const Shader> shaders();

}  // namespace tessera::vulkan
