// The CPU kernels for NEON. No compiler flags select the set: the target region below does, so that nothing outside
// its namespace is compiled for it. All the code is in cpu/kernel/.
#define HWY_COMPILE_ONLY_STATIC
#define HWY_BASELINE_TARGETS HWY_NEON
#define TESSERA_ISA neon
#include "cpu/isa/region.hpp"
