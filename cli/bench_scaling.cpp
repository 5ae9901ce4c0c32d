// SPDX-License-Identifier: Apache-2.0
// `tessera bench --suite scaling`: parallel speedup of the kernels, beside that of pure FMA on registers, which is the
// speedup that the machine itself offers. See cli/bench.hpp. Method: docs/benchmarks.md.
#include <cstdio>

#include "cli/bench.hpp"
#include "cli/bench_pass.hpp"
#include "cli/rates.hpp"
#include "cli/timing.hpp"
#include "core/processor.hpp"

namespace tessera::cli {
namespace {

constexpr int rounds = 5;

const Table table({{"type", 4, true},
                   {"N", 5},
                   {"D", 4},
                   {"H", 3},
                   {"pass", 8, true},
                   {"kernel", 10, true},
                   {"1 thread", 10},
                   {"threads", 10},
                   {"gain", 6},
                   {"FMA gain", 8},
                   {"of the limit", share_width, true}});

Json measure(const BenchShape& shape, const BenchArguments& a) {
  const int threads = a.execution.threads();
  Execution one = a.execution.execution(), many = one;
  one.threads = 1, many.threads = threads;
  BenchPass alone(shape, one), together(shape, many);
  std::vector<double> alone_times, together_times, gains, fma_gains, shares;
  for (int round = 0; round < rounds; ++round) {
    double fma_alone = 0;
    {
      const OneProcessor here(round, rounds);
      alone_times.push_back(seconds_of([&] { alone.run(false); }));
      fma_alone = measure_fma_rate(1, 0.1);
    }
    together_times.push_back(seconds_of([&] { together.run(false); }));
    fma_gains.push_back(measure_fma_rate(threads, 0.1) / fma_alone);
    gains.push_back(alone_times.back() / together_times.back());
    shares.push_back(gains.back() / fma_gains.back());
  }
  std::fputs(
      table
          .row({name_of(shape.type), std::to_string(shape.N), std::to_string(shape.D), std::to_string(shape.H),
                shape.pass(), together.kernel(), time_text(median(alone_times)), time_text(median(together_times)),
                format("%.2fx", median(gains)), format("%.2fx", median(fma_gains)), share_text(median(shares))})
          .c_str(),
      stdout);
  std::fflush(stdout);
  return {{"type", name_of(shape.type)},
          {"N", shape.N},
          {"D", shape.D},
          {"H", shape.H},
          {"pass", shape.pass()},
          {"kernel", together.kernel()},
          {"gain", median(gains)},
          {"fma_gain", median(fma_gains)},
          {"of_fma_gain", median(shares)}};
}

}  // namespace

int bench_scaling(const BenchArguments& a) {
  Json json;
  json["machine"] = machine();
  json["threads"] = a.execution.threads();
  json["rows"] = Json::array();
  std::printf("%s, 1 and %d threads, B=1\n\n", processor().c_str(), a.execution.threads());
  std::fputs(table.heading().c_str(), stdout);
  for (const Type type : {Type::f32, Type::bf16})
    for (const bool backward : {false, true}) json["rows"].push_back(measure({type, 4096, 128, backward, 1, 16}, a));
  std::printf(
      "\nMedians of %d rounds. The limit: the gain of registers alone in the same round; one thread of either runs on "
      "the\n"
      "same processor, another one in each round.\n",
      rounds);
  save_json(a.json, json);
  return 0;
}

}  // namespace tessera::cli
