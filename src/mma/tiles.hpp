// SPDX-License-Identifier: Apache-2.0
// Which tile of the `mma` kernels a problem gets, by the shared memory and the instructions of a class of GPUs.
// Included by src/mma and the tests; docs/gpu_kernels.md, "mma".
#pragma once

#include <optional>
#include <span>
#include <string>

#include "core/problem.hpp"
#include "cuda/device.hpp"
#include "mma/backward_config.hpp"
#include "mma/one_pass_config.hpp"

namespace tessera::mma {

// GPUs that get the same tiles; `name` is the architecture that stands for them.
struct TileClass {
  const char* name;
  int major, minor;  // compute capability, at least
  int shared_bytes;  // of a block, at most
  std::span<const Config> tiles;
  std::span<const OnePassConfig> one_pass;  // D and Dv: at most

  bool turing() const { return major < 8; }  // sm_75's instructions
};
std::span<const TileClass> tile_classes();  // a GPU's is the first that it can have

// What TESSERA_TILES says; empty: nothing.
const std::string& wanted_class();
// The GPU's class, or the wanted one. Null: there is none of that name, or the GPU is below all.
const TileClass* class_of(const cuda::Target& target);
std::string class_names();  // "sm_100, sm_90, ..."

std::optional<Config> forward_tile(const Problem& problem, const TileClass& of);

// The gradients of one side that are wanted: dQ, or dK and dV. None: no tile fits.
std::optional<BackwardConfig> backward_tile(const Problem& problem, const TileClass& of, Side side, bool dX, bool dY);

// All gradients in one pass, of a problem that asks for all. None: the class has no tile for these head dims.
std::optional<OnePassConfig> one_pass_tile(const Problem& problem, const TileClass& of);

}  // namespace tessera::mma
