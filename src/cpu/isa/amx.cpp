// SPDX-License-Identifier: Apache-2.0
// The CPU kernels for AMX with AVX-512: products on the matrix unit, everything else as in avx512.cpp. All the code is
// in cpu/kernel/; no compiler flags select the set.
#define HWY_COMPILE_ONLY_STATIC
#define HWY_BASELINE_TARGETS HWY_AVX3
#define TESSERA_ISA amx
#define TESSERA_NAMESPACE N_AMX
#define TESSERA_MATRIX_UNIT 1
#include "cpu/isa/region.hpp"
