// SPDX-License-Identifier: Apache-2.0
// Run-time dispatch on the instruction set for the command line's own loops (function multiversioning). Included by
// cli/rates.cpp and cli/unfused.cpp, whose loops must run at the machine's full speed. One always-inlined template body
// is inlined into one function per instruction set, which carries the target attribute.
#pragma once

namespace tessera::cli {

enum class Isa { baseline, avx2, avx512 };

#if defined(__x86_64__)
#define TESSERA_TARGET_AVX2 __attribute__((target("avx2,fma")))
#define TESSERA_TARGET_AVX512 __attribute__((target("avx512f,avx512vl,avx512dq,avx512bw,fma")))
inline Isa best_isa() {
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bw"))
    return Isa::avx512;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? Isa::avx2 : Isa::baseline;
}
#else
#define TESSERA_TARGET_AVX2
#define TESSERA_TARGET_AVX512
inline Isa best_isa() { return Isa::baseline; }  // NEON has fused multiply-add in its baseline
#endif

#define TESSERA_INLINE [[gnu::always_inline]] inline

inline const char* name_of(Isa isa) {
#if defined(__x86_64__)
  return isa == Isa::avx512 ? "AVX-512" : isa == Isa::avx2 ? "AVX2" : "SSE2";
#else
  return isa == Isa::baseline ? "baseline" : "?";
#endif
}

// W floats as a GCC vector type, with the alignment of a float: rows may be unaligned.
template <int W>
struct Vector {
  typedef float type __attribute__((vector_size(W * 4), aligned(4), may_alias));
  typedef int ints __attribute__((vector_size(W * 4), aligned(4), may_alias));
};

}  // namespace tessera::cli
