// Attention one query row at a time, as inference engines without matrix products compute it (ggml's CPU path for one
// row): dot products with every key, online softmax, V added in f32. Included by bench/cpu_baselines.cpp.
#pragma once

#include "bench/baseline.hpp"

namespace tessera::bench {

// Needs AVX-512; the dim is a multiple of 16.
bool row_by_row_usable();

void row_by_row(const Problem& problem, float* o);

}  // namespace tessera::bench
