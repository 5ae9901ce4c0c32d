// SPDX-License-Identifier: Apache-2.0
// The decode part of `tessera bench --suite cpu`: one query against many keys, as a share of the memory bandwidth that
// the same threads reach. See cli/bench.hpp. Method: docs/benchmarks.md.
#include <algorithm>
#include <cstdio>

#include "cli/bench.hpp"
#include "cli/rates.hpp"
#include "cli/timing.hpp"
#include "tessera/tessera.hpp"

namespace tessera::cli {
namespace {

struct Decoding {
  Type type;
  std::int64_t keys, Hq, Hk, D = 128;
};

constexpr Decoding rows[] = {{Type::f32, 8192, 8, 8},    {Type::f32, 32768, 8, 8},  {Type::f32, 8192, 32, 8},
                             {Type::bf16, 8192, 8, 8},   {Type::bf16, 32768, 8, 8}, {Type::bf16, 8192, 32, 8},
                             {Type::bf16, 32768, 32, 8}, {Type::f16, 8192, 8, 8}};
constexpr std::size_t least_rounds = 9;
constexpr double least_seconds = 0.2;

const Table table({{"type", 4, true},
                   {"keys", 6},
                   {"heads", 6},
                   {"D", 4},
                   {"kernel", 10, true},
                   {"time", 10},
                   {"GB/s", 6},
                   {"of the limit", share_width, true}});

Json measure(const Decoding& row, const BenchArguments& a) {
  const Array q = random_normal(row.type, {1, 1, row.Hq, row.D}, 1),
              k = random_normal(row.type, {1, row.keys, row.Hk, row.D}, 2);
  const Array v = random_normal(row.type, {1, row.keys, row.Hk, row.D}, 3);
  const Array o(row.type, {1, 1, row.Hq, row.D}), lse(Type::f32, {1, row.Hq, 1});
  Inputs inputs;
  inputs.q = q.view(), inputs.k = k.view(), inputs.v = v.view();
  const Outputs outputs{.o = o.view(), .lse = lse.view()};
  Execution execution = a.execution.execution();
  const Plan plan = Plan::forward(inputs, outputs, {}, execution);
  Array workspace(Type::u8, {static_cast<std::int64_t>(plan.workspace_size())});
  execution.workspace = workspace.data<void>(), execution.workspace_bytes = plan.workspace_size();
  const auto call = [&] { plan.run(inputs, outputs, {}, execution); };
  call();

  const std::size_t bytes = k.bytes() + v.bytes();
  const Array memory(Type::u8, {static_cast<std::int64_t>(bytes)});
  std::vector<double> times, rates;
  for (double sum = 0; times.size() < least_rounds || sum < least_seconds; sum += times.back()) {
    times.push_back(seconds_of(call));
    rates.push_back(measure_read_rate(memory.data<void>(), bytes, a.execution.threads(), std::max(0.01, times.back())));
  }
  const double rate = static_cast<double>(bytes) / median(times), limit = median(rates);
  std::fputs(table
                 .row({name_of(row.type), std::to_string(row.keys), format("%d/%d", int(row.Hq), int(row.Hk)),
                       std::to_string(row.D), plan.kernel(), time_text(median(times)), format("%.1f", rate / 1e9),
                       share_text(rate / limit) + format(" of reading %.1f", limit / 1e9)})
                 .c_str(),
             stdout);
  std::fflush(stdout);
  return {{"type", name_of(row.type)},
          {"keys", row.keys},
          {"Hq", row.Hq},
          {"Hk", row.Hk},
          {"D", row.D},
          {"kernel", plan.kernel()},
          {"seconds", median(times)},
          {"gbytes", rate / 1e9},
          {"read_gbytes", limit / 1e9},
          {"of_limit", rate / limit}};
}

}  // namespace

Json bench_decode(const BenchArguments& a) {
  std::printf("\nDecoding: one query, bytes of K and V per second beside reading as many in the same rounds.\n\n");
  std::fputs(table.heading().c_str(), stdout);
  Json json = Json::array();
  for (const Decoding& row : rows) json.push_back(measure(row, a));
  return json;
}

}  // namespace tessera::cli
