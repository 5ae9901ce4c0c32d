// SPDX-License-Identifier: Apache-2.0
// Generated units: a few lines of text that name a kernel template, its configuration and its parameters. All there is
// to read of a compiled kernel besides the files it includes. Included by the GPU families' planners.
#pragma once

#include <string>

#include "gpu/config.hpp"

namespace tessera::gpu {

inline constexpr const char* kernel_symbol = "tessera_kernel";

// As device code writes them.
std::string spelled(Element element);
const char* spelled(bool value);
std::string spelled(const ScoreConfig& options);
std::string spelled(const RowConfig& config);

// What a unit says, all of it as device code.
struct UnitText {
  std::string file;           // "ladder/kernel/vector_forward.cuh"
  std::string function;       // "tessera::ladder::vector_forward<config>"
  std::string parameters;     // "tessera::gpu::ForwardParams"
  std::string config;         // "tessera::ladder::Config config{...}"; empty: the kernel has none
  std::string launch_bounds;  // "config.threads, 1": threads of a block, blocks of a multiprocessor at least
  std::string preamble = "";  // before the kernel's own file

  std::string str() const;
};

}  // namespace tessera::gpu
