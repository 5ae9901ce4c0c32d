// Instruction sets and the processor's name; see isa.hpp and kernels.hpp.
#include "cpu/isa.hpp"

#include <fstream>
#include <string>
#include <utility>

#include "cpu/amx.hpp"
#include "cpu/kernels.hpp"
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace tessera::cpu {

#if defined(__x86_64__)

// g++ 12 does not know "f16c" here, and Highway's AVX2 target includes it.
static bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 29));
}

static bool has_avx512_bf16() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 5));
}

const std::vector<IsaChoice>& isa_choices() {
  static const std::vector<IsaChoice> list = [] {
    __builtin_cpu_init();
    const bool has_sse4 = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("ssse3") &&
                          __builtin_cpu_supports("aes") && __builtin_cpu_supports("pclmul");
    const bool has_avx2 = has_sse4 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && has_f16c();
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    std::vector<IsaChoice> all{{&amx, has_avx512 && amx_usable(), "AMX with bf16, or the system's leave to use it"},
                               {&avx512bf16, has_avx512 && has_avx512_bf16(), "AVX512_BF16"},
                               {&avx512, has_avx512, "AVX-512 F, BW, DQ and VL"},
                               {&avx2, has_avx2, "AVX2, FMA, BMI2 and F16C"},
                               {&sse4, has_sse4, "SSE4.2, AES and PCLMUL"}};
    // Intel's processors do half as much by dot products of bf16 as by multiply-adds in f32.
    if (__builtin_cpu_is("intel")) std::swap(all[1], all[2]);
    return all;
  }();
  return list;
}

#elif defined(__aarch64__)

const std::vector<IsaChoice>& isa_choices() {
  static const std::vector<IsaChoice> list{{&neon, true, "NEON"}};  // part of every AArch64 processor
  return list;
}

#else

const std::vector<IsaChoice>& isa_choices() {
  static const std::vector<IsaChoice> list;
  return list;
}

#endif

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const auto colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

std::string instruction_sets() {
  std::string names;
  for (const IsaChoice& choice : isa_choices()) {
    if (!choice.here) continue;
    if (!names.empty()) names += " ";
    names += choice.isa->name;
  }
  return names.empty() ? "none that the kernels know" : names;
}

}  // namespace tessera::cpu
