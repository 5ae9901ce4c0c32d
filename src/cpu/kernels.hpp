// SPDX-License-Identifier: Apache-2.0
// The CPU backend: one kernel per instruction set that this processor has, and small operations that need no plan.
// Included by src/api only.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "core/append.hpp"
#include "core/kernel.hpp"

namespace tessera::cpu {

// Best first; only those compiled in. One that this processor lacks refuses every problem and says so.
std::vector<const Kernel*> kernels();

void append(const AppendArgs& args, const NewRows& rows, int threads);
void merge(std::span<const Outputs> partials, const Outputs& merged, int threads);
void dropout_mask(const Tensor& mask, const Tensor& rng, const Options& options, int threads);

std::string instruction_sets();  // those that the kernels can use here

}  // namespace tessera::cpu
