// SPDX-License-Identifier: Apache-2.0
// Attention one query row at a time (matrix-vector), as inference engines without GEMM compute it (ggml's CPU path for
// one row): dot products with every key, online softmax, V accumulated in f32. Included by bench/cpu_baselines.cpp.
#pragma once

#include "bench/baseline.hpp"

namespace tessera::bench {

// Needs AVX-512; the dim is a multiple of 16.
bool row_by_row_usable();

void row_by_row(const Problem& problem, float* o);

}  // namespace tessera::bench
