// SPDX-License-Identifier: Apache-2.0
// See cpu/amx.hpp. Linux gives the tiles' 8 KiB of state only to processes that ask, and may refuse.
#include "cpu/amx.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tessera::cpu {

#if defined(__x86_64__)

static bool processor_has_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & (1u << 27))) return false;  // OSXSAVE: xgetbv may be asked
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned vectors_and_tiles = 0x600e6;  // SSE, AVX, the three parts of AVX-512, tile shapes, tile data
  if ((low & vectors_and_tiles) != vectors_and_tiles) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & (1u << 22)) || !(d & (1u << 24))) return false;  // bf16, tiles
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 5));                                     // AVX512_BF16
}

bool amx_usable() {
  constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return processor_has_amx() && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

#else

bool amx_usable() { return false; }

#endif

}  // namespace tessera::cpu
