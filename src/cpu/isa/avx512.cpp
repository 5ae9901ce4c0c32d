// SPDX-License-Identifier: Apache-2.0
// The CPU kernels for AVX-512(F,BW,DQ,VL). No compiler flags select the set: the target region below does, so that
// nothing outside its namespace is compiled for it. All the code is in cpu/kernel/.
#define HWY_COMPILE_ONLY_STATIC
#define HWY_BASELINE_TARGETS HWY_AVX3
#define TESSERA_ISA avx512
#include "cpu/isa/region.hpp"
