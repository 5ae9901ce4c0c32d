// SPDX-License-Identifier: Apache-2.0
// The CPU kernels for NEON, which every 64-bit ARM processor has: no target region is needed, nor wanted. Highway would
// open one for AES, which not every processor has, and which gcc leaves out of constructors that it writes itself; the
// macro, which says that the set cannot be chosen at run time, keeps it from that. All the code is in cpu/kernel/.
#define TOOLCHAIN_MISS_SYS_AUXV_H
#define HWY_COMPILE_ONLY_STATIC
#define HWY_BASELINE_TARGETS HWY_NEON
#define TESSERA_ISA neon
#include "cpu/isa/region.hpp"
