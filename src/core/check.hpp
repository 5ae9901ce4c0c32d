// SPDX-License-Identifier: Apache-2.0
// Every rule for the caller's arguments, and its sentence. From tensors to a checked Problem; nothing after this
// asserts anything about users. Included by src/api. Each rule has a row in tests/api/check_rows.hpp that expects its
// text.
#pragma once

#include <span>

#include "core/kernel.hpp"
#include "core/problem.hpp"

namespace tessera {

// Shapes, types, strides, options. Reads no tensor's data. Throws Failure.
Problem check_forward(const Inputs& inputs, const Outputs& outputs, const Options& options, const Execution& execution);
Problem check_backward(const Inputs& inputs, const Saved& saved, const Gradients& gradients, const Options& options,
                       const Execution& execution);

// What only a run needs: pointers that are there and aligned to their elements, outputs that overlap nothing, and,
// where the lengths lie in host memory, lengths that make sense. (On a device they are not read, that would
// synchronise; kernels clamp them.)
void check_run(const Problem& problem, const Call& call);
// The caller's workspace, of which `bytes` are used, overlaps no tensor.
void check_workspace(const Call& call, std::size_t bytes);

void check_merge(std::span<const Outputs> partials, const Outputs& merged, const Execution& execution);
void check_dropout_mask(const Tensor& mask, const Tensor& rng, const Options& options, const Execution& execution);

}  // namespace tessera
