// The table of problems that `tessera bench` times.
// Part of tessera_cases; see tables.hpp. Inputs are built by the command itself: these rows are shapes and types.
// Implements docs/benchmarks.md's list.
#include "cases/tables.hpp"

namespace tessera::cases {

std::vector<Case> performance() {
  return {
      {.name = "f32_512x64", .Nq = 512, .Nk = 512, .Hq = 8, .Hk = 8, .D = 64},
      {.name = "f32_512x64_causal", .Nq = 512, .Nk = 512, .Hq = 8, .Hk = 8, .D = 64, .options = {.causal = true}},
      {.name = "f32_2048x64", .Nq = 2048, .Nk = 2048, .Hq = 8, .Hk = 8, .D = 64},
      {.name = "f32_2048x64_causal", .Nq = 2048, .Nk = 2048, .Hq = 8, .Hk = 8, .D = 64, .options = {.causal = true}},
      {.name = "f32_2048x128", .Nq = 2048, .Nk = 2048, .Hq = 8, .Hk = 8, .D = 128},
      {.name = "f32_2048x128_causal", .Nq = 2048, .Nk = 2048, .Hq = 8, .Hk = 8, .D = 128, .options = {.causal = true}},
      {.name = "f32_4096x128", .Nq = 4096, .Nk = 4096, .Hq = 8, .Hk = 8, .D = 128},
      {.name = "f32_4096x128_causal", .Nq = 4096, .Nk = 4096, .Hq = 8, .Hk = 8, .D = 128, .options = {.causal = true}},
      {.name = "f16_2048x64", .Nq = 2048, .Nk = 2048, .Hq = 8, .Hk = 8, .D = 64, .type = Type::f16},
      {.name = "f16_2048x128_causal",
       .Nq = 2048,
       .Nk = 2048,
       .Hq = 8,
       .Hk = 8,
       .D = 128,
       .type = Type::f16,
       .options = {.causal = true}},
      {.name = "bf16_2048x64", .Nq = 2048, .Nk = 2048, .Hq = 8, .Hk = 8, .D = 64, .type = Type::bf16},
      {.name = "bf16_2048x128_causal",
       .Nq = 2048,
       .Nk = 2048,
       .Hq = 8,
       .Hk = 8,
       .D = 128,
       .type = Type::bf16,
       .options = {.causal = true}},
  };
}

}  // namespace tessera::cases
