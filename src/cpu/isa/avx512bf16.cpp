// SPDX-License-Identifier: Apache-2.0
// The CPU kernels for AVX-512 with dot products of bf16 (AVX512_BF16): those for bf16, everything else as in
// avx512.cpp. All the code is in cpu/kernel/; no compiler flags select the set.
#define HWY_COMPILE_ONLY_STATIC
#define HWY_BASELINE_TARGETS HWY_AVX3
#define TESSERA_ISA avx512bf16
#define TESSERA_NAMESPACE N_AVX3_BF16
#define TESSERA_MATRIX_UNIT 1
#define TESSERA_DOT_PRODUCTS 1
#include "cpu/isa/region.hpp"
