// SPDX-License-Identifier: Apache-2.0
// The CPU kernels for SSE4.2. No compiler flags select the set: the target region below does, so that nothing outside
// its namespace is compiled for it. All the code is in cpu/kernel/.
// Highway's SSE4 includes AES and PCLMUL, which the first processors with SSE4.2 lack and the kernels have no use for.
#define HWY_DISABLE_PCLMUL_AES
#define HWY_COMPILE_ONLY_STATIC
#define HWY_BASELINE_TARGETS HWY_SSE4
#define TESSERA_ISA sse4
#include "cpu/isa/region.hpp"
