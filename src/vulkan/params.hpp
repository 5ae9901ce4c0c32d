// SPDX-License-Identifier: Apache-2.0
// The parameter blocks of the Vulkan kernels: what every GPU kernel is given (gpu/params.hpp), and what CUDA kernels
// are compiled for and these ones read: dims, types, options. translate.py makes GLSL of it; a kernel finds its block
// by the address in its push constants.
#pragma once

#include "gpu/params.hpp"

namespace tessera::vulkan {

// Types of elements: 0 f32, 1 f16, 2 bf16.
struct Kinds {
  Int32 q, o, d_o, dq, dk, dv, bias, dbias;
};

// Blocks of one dispatch are numbered over a grid of two dimensions, since one has no more than 65535 on some devices.
struct Launch {
  Int64 blocks;
  Int32 D, Dv;
  Int32 softcap, alibi, bias, mask, dropout;  // options of scores: 1 where on
  Int32 reserved;
};

struct ForwardBlock {
  gpu::ForwardParams p;
  Launch launch;
  Kinds kind;
};

struct BackwardBlock {
  gpu::BackwardParams p;
  Launch launch;
  Kinds kind;
};

}  // namespace tessera::vulkan
