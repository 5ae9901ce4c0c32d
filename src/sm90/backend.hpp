// What the plans of the Hopper kernels share on the host: tensor maps, and the one-pass backward plan, ready to run.
// Included by src/sm90/backend.cpp and src/sm90/one_pass_backend.cpp. docs/architecture.md, "Hopper".
#pragma once

#include <memory>

#include "core/kernel.hpp"
#include "sm90/one_pass_plan.hpp"
#include "sm90/params.hpp"

namespace tessera::sm90 {

// A [B,N,H,D] or packed [T,H,D] tensor of 16-bit elements as {D, N, H, B}; a box is 64 columns of `rows` tokens.
TensorMap tensor_map(const Tensor& tensor, int rows);

// The plan with its kernels loaded on the problem's device.
std::unique_ptr<KernelPlan> load_one_pass(const Problem& problem, const OnePassPlan& plan);

}  // namespace tessera::sm90
