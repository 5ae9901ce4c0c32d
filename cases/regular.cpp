// SPDX-License-Identifier: Apache-2.0
// The table of ordinary shapes: what users run every day, in every type; and ancestor C's two cases by name.
// Part of tessera_cases; see tables.hpp.
// Implements docs/numerics.md, "Suites".
#include "cases/tables.hpp"

namespace tessera::cases {

std::vector<Case> in_types(const std::vector<Case>& rows, const std::vector<Type>& types) {
  std::vector<Case> all;
  for (const Case& row : rows)
    for (Type type : types) {
      Case c = row;
      c.type = type, c.name += std::string("_") + name_of(type), c.seed = all.size() + 1;
      all.push_back(c);
    }
  return all;
}

std::vector<Case> regular() {
  std::vector<Case> rows = in_types(
      {
          {.name = "one_tile", .Nq = 64, .Nk = 64, .Hq = 2, .Hk = 2, .D = 64},
          {.name = "square", .B = 2, .Nq = 256, .Nk = 256, .Hq = 2, .Hk = 2, .D = 64},
          {.name = "square_causal",
           .B = 2,
           .Nq = 256,
           .Nk = 256,
           .Hq = 2,
           .Hk = 2,
           .D = 64,
           .options = {.causal = true}},
          {.name = "several_tiles", .Nq = 200, .Nk = 600, .Hq = 2, .Hk = 1, .D = 64},
          {.name = "several_tiles_causal",
           .Nq = 520,
           .Nk = 520,
           .Hq = 2,
           .Hk = 1,
           .D = 32,
           .options = {.causal = true}},
          {.name = "wide_head", .Nq = 150, .Nk = 300, .Hq = 2, .Hk = 2, .D = 128},
          {.name = "wide_head_causal", .Nq = 300, .Nk = 300, .Hq = 2, .Hk = 2, .D = 128, .options = {.causal = true}},
          {.name = "cross_attention", .B = 3, .Nq = 77, .Nk = 231, .Hq = 3, .Hk = 3, .D = 40},
          {.name = "decode", .B = 3, .Nq = 1, .Nk = 512, .Hq = 8, .Hk = 2, .D = 64},
          {.name = "decode_causal", .B = 3, .Nq = 1, .Nk = 512, .Hq = 8, .Hk = 2, .D = 64, .options = {.causal = true}},
          {.name = "chunk_of_prefill", .Nq = 96, .Nk = 480, .Hq = 4, .Hk = 1, .D = 64, .options = {.causal = true}},
          {.name = "long_narrow", .Nq = 1024, .Nk = 1024, .Hq = 1, .Hk = 1, .D = 16, .options = {.causal = true}},
          {.name = "packed_batch",
           .Hq = 4,
           .Hk = 2,
           .D = 64,
           .options = {.causal = true},
           .packed_q = {50, 130, 7, 64},
           .packed_k = {50, 130, 7, 64}},
      },
      {Type::f32, Type::f16, Type::bf16});
  rows.push_back(
      {.name = "identity_4x4", .Nq = 4, .Nk = 4, .Hq = 1, .Hk = 1, .D = 4, .distribution = Distribution::identity});
  // Rows repeat, and so do their roundings: dSink adds them up with one sign. The fuzzer found the seed.
  rows.push_back({.name = "repeated_one_hot_rows",
                  .Nq = 74,
                  .Nk = 23,
                  .Hq = 1,
                  .Hk = 1,
                  .D = 8,
                  .type = Type::bf16,
                  .sinks = Sinks::finite,
                  .distribution = Distribution::identity,
                  .seed = 18944});
  rows.push_back({.name = "random_128x64", .Nq = 128, .Nk = 128, .Hq = 1, .Hk = 1, .D = 64, .seed = 42});
  return rows;
}

}  // namespace tessera::cases
