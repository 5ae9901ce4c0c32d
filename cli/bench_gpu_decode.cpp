// SPDX-License-Identifier: Apache-2.0
// `tessera bench --suite decode`: one query against many keys on a GPU, by the kernel that a call gets and by `decode`,
// in bytes of K and V per second. Calls go round over as many caches as exceed the L2 cache several times, as the
// layers of a model do. See cli/bench.hpp. Method: docs/benchmarks.md.
#include <algorithm>
#include <cstdio>

#include "cli/bench.hpp"
#include "cli/gpu.hpp"
#include "cli/timing.hpp"

namespace tessera::cli {
namespace {

struct Decoding {
  std::int64_t B, keys, Hq = 32, Hk = 8, D = 128;

  std::int64_t bytes() const { return 2 * B * keys * Hk * D * 2; }
};

constexpr Decoding rows[] = {{1, 1024},   {1, 4096}, {1, 8192},  {1, 32768},
                             {1, 131072}, {8, 4096}, {16, 8192}, {64, 8192}};
constexpr std::int64_t cold_bytes = 200 << 20;
constexpr int calls_per_run = 48, default_runs = 9;

const Table table({{"B", 3}, {"keys", 6}, {"heads", 6}, {"D", 4}, {"kernel", 10, true}, {"time", 10}, {"TB/s", 6}});

// K and V of one layer.
struct Cache {
  GpuArray k, v;
};

Json measure(const Decoding& row, const char* kernel, int runs) {
  const Array keys = random_normal(Type::bf16, {row.B, row.keys, row.Hk, row.D}, 2);
  const Array values = random_normal(Type::bf16, {row.B, row.keys, row.Hk, row.D}, 3);
  std::vector<Cache> caches;
  for (std::int64_t n = 0; n < std::max<std::int64_t>(1, cold_bytes / row.bytes()); ++n)
    caches.push_back({GpuArray(keys), GpuArray(values)});
  const GpuArray q(random_normal(Type::bf16, {row.B, 1, row.Hq, row.D}, 1)), o(Type::bf16, {row.B, 1, row.Hq, row.D});
  const Outputs outputs{.o = o.view(), .lse = {}};
  std::vector<Inputs> inputs(caches.size());
  for (std::size_t n = 0; n < caches.size(); ++n)
    inputs[n].q = q.view(), inputs[n].k = caches[n].k.view(), inputs[n].v = caches[n].v.view();
  Execution execution{.device = first_gpu, .kernel = kernel};
  const Plan plan = Plan::forward(inputs[0], outputs, {}, execution);
  const cases::DeviceMemory workspace(first_gpu, plan.workspace_size());
  execution.workspace = workspace.data(), execution.workspace_bytes = plan.workspace_size();
  std::size_t turn = 0;
  const double seconds = GpuTimer().median_seconds(
                             [&] {
                               for (int call = 0; call < calls_per_run; ++call)
                                 plan.run(inputs[turn++ % inputs.size()], outputs, {}, execution);
                             },
                             runs) /
                         calls_per_run;
  const double rate = static_cast<double>(row.bytes()) / seconds;
  std::fputs(table
                 .row({std::to_string(row.B), std::to_string(row.keys), format("%d/%d", int(row.Hq), int(row.Hk)),
                       std::to_string(row.D), plan.kernel(), time_text(seconds), format("%.2f", rate / 1e12)})
                 .c_str(),
             stdout);
  std::fflush(stdout);
  return {{"B", row.B}, {"keys", row.keys},        {"Hq", row.Hq},       {"Hk", row.Hk},
          {"D", row.D}, {"kernel", plan.kernel()}, {"seconds", seconds}, {"tbytes", rate / 1e12}};
}

}  // namespace

int bench_gpu_decode(const BenchArguments& a) {
  require_gpu("bench --suite decode");
  const char* chosen = a.execution.execution().kernel;
  std::printf("%s\n\nDecoding: one query, bf16, bytes of K and V per second; caches beyond the L2 cache in turn.\n\n",
              gpu_name().c_str());
  std::fputs(table.heading().c_str(), stdout);
  Json json;
  json["machine"] = machine();
  json["gpu"] = gpu_name();
  json["suite"] = a.suite;
  json["rows"] = Json::array();
  for (const Decoding& row : rows)
    for (const char* kernel : chosen ? std::vector<const char*>{chosen} : std::vector<const char*>{nullptr, "decode"})
      json["rows"].push_back(measure(row, kernel, a.repeat > 0 ? a.repeat : default_runs));
  std::printf("\nMedians of CUDA-event times over %d calls each, launches included.\n", calls_per_run);
  save_json(a.json, json);
  return 0;
}

}  // namespace tessera::cli
