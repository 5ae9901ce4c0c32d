// SPDX-License-Identifier: Apache-2.0
// Tensor maps: what the copy engine (TMA) is told of a tensor. Made by the driver at each call, and kept.
// Included by src/sm90/steps.cpp and the tests. docs/gpu_kernels.md, "Hopper".
#pragma once

#include "sm90/params.hpp"
#include "tessera/types.hpp"

namespace tessera::sm90 {

// A [B,N,H,D] or packed [T,H,D] tensor of 16-bit elements as {D, N, H, B}; a box is 64 columns of `rows` tokens.
TensorMap tensor_map(const Tensor& tensor, int rows);

}  // namespace tessera::sm90
