// SPDX-License-Identifier: Apache-2.0
// Instruction sets; see isa.hpp and kernels.hpp.
#include "cpu/isa.hpp"

#include <span>
#include <utility>

#include "core/environment.hpp"
#include "core/failure.hpp"
#include "core/once.hpp"
#include "cpu/amx.hpp"
#include "cpu/kernels.hpp"
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace tessera::cpu {
namespace {

struct Known {
  const Isa* isa;
  bool (*here)();     // this processor and its operating system can run it
  const char* needs;  // for the sentence that refuses it
};

#if defined(__x86_64__)

bool has_sse4() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("ssse3");
}

// g++ 12 does not know "f16c" here, and Highway's AVX2 target includes it.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 29));
}

bool has_avx2() {
  return has_sse4() && __builtin_cpu_supports("aes") && __builtin_cpu_supports("pclmul") &&
         __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2") && has_f16c();
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_avx512_bf16() {
  unsigned a, b, c, d;
  return has_avx512() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 5));
}

bool has_amx() { return has_avx512() && amx_usable(); }

constexpr Known known[] = {{&sse4, has_sse4, "SSE4.2"},
                           {&avx2, has_avx2, "AVX2, FMA, BMI2, F16C, AES and PCLMUL"},
                           {&avx512, has_avx512, "AVX-512 F, BW, DQ and VL"},
                           {&avx512bf16, has_avx512_bf16, "AVX512_BF16"},
                           {&amx, has_amx, "AMX with bf16, or the system's leave to use it"}};

// Intel's processors do half as much by dot products of bf16 as by multiply-adds in f32.
bool prefers_f32_to_bf16() { return __builtin_cpu_is("intel"); }

#elif defined(__aarch64__)

constexpr Known known[] = {{&neon, [] { return true; }, "NEON"}};  // part of every AArch64 processor

#else

constexpr std::span<const Known> known;

#endif

IsaChoices choices() {
  const char* value = environment("TESSERA_ISA");
  IsaChoices out{{}, value ? value : "", ""};
  std::string names;
  bool hidden = false;
  for (const Known& k : known) {
    names += text(names.empty() ? "" : ", ", k.isa->name);
    std::string missing;
    if (hidden)
      missing = text("TESSERA_ISA is ", out.limit, ", which hides it");
    else if (!k.here())
      missing = text("this processor lacks ", k.needs);
    out.list.insert(out.list.begin(), {k.isa, missing});
    hidden = hidden || out.limit == k.isa->name;
  }
  if (!hidden && !out.limit.empty())
    out.fault = text("TESSERA_ISA: is '", out.limit, "'; must be empty or one of ", names);
#if defined(__x86_64__)
  if (prefers_f32_to_bf16()) std::swap(out.list[1], out.list[2]);
#endif
  return out;
}

}  // namespace

const IsaChoices& isa_choices() {
  static constinit Once<const IsaChoices> found;
  return found.get(choices);
}

std::string instruction_sets() {
  const IsaChoices& choices = isa_choices();
  if (!choices.fault.empty()) return "none: " + choices.fault;
  std::string names;
  for (const IsaChoice& choice : choices.list)
    if (choice.missing.empty()) names += text(names.empty() ? "" : " ", choice.isa->name);
  if (names.empty()) names = "none that the kernels know";
  return choices.limit.empty() ? names : text(names, ", limited by TESSERA_ISA=", choices.limit);
}

}  // namespace tessera::cpu
