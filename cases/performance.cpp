// SPDX-License-Identifier: Apache-2.0
// The table of problems that `tessera bench` times: each shape full and causal.
// Part of tessera_cases; see tables.hpp. The command makes its own inputs: these rows are shapes and types.
// Implements docs/benchmarks.md's list.
#include "cases/tables.hpp"

namespace tessera::cases {
namespace {

struct Row {
  Type type;
  std::int64_t N, D;
};

constexpr Row rows[] = {
    {Type::f32, 512, 64},  {Type::f32, 2048, 64},  {Type::f32, 2048, 128}, {Type::f32, 4096, 128},
    {Type::f16, 2048, 64}, {Type::f16, 2048, 128}, {Type::bf16, 2048, 64}, {Type::bf16, 2048, 128},
};

}  // namespace

std::vector<Case> performance() {
  std::vector<Case> all;
  for (const Row& row : rows)
    for (const bool causal : {false, true}) {
      std::string name = name_of(row.type);
      name += '_';
      name += std::to_string(row.N);
      name += 'x';
      name += std::to_string(row.D);
      if (causal) name += "_causal";
      Case one{.name = name, .Nq = row.N, .Nk = row.N, .Hq = 8, .Hk = 8, .D = row.D, .type = row.type};
      one.options.causal = causal;
      all.push_back(one);
    }
  return all;
}

}  // namespace tessera::cases
