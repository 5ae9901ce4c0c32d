// SPDX-License-Identifier: Apache-2.0
// `tessera bench --suite decode`: one query against many keys on a GPU, by the kernel that a call gets and by `decode`,
// beside a kernel that only reads K and V. Calls are captured in a graph that goes round over as many caches as exceed
// the L2 cache several times, as the layers of a model do. See cli/bench.hpp. Method: docs/benchmarks.md.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "cli/bench.hpp"
#include "cli/gpu.hpp"
#include "cli/timing.hpp"
#include "cli/turns.hpp"
#include "cuda/read.hpp"

namespace tessera::cli {
namespace {

struct Decoding {
  std::int64_t B, keys;
  double bar;  // microseconds on an H200
  std::int64_t Hq = 32, Hk = 8, D = 128;

  std::int64_t side_bytes() const { return B * keys * Hk * D * 2; }
  std::int64_t bytes() const { return 2 * side_bytes(); }
};

constexpr Decoding rows[] = {{1, 1024, 6.5},   {1, 4096, 9.5}, {1, 8192, 13},   {1, 32768, 35.5},
                             {1, 131072, 126}, {8, 4096, 35},  {16, 8192, 121}, {64, 8192, 482}};
constexpr std::int64_t cold_bytes = 200 << 20;
constexpr std::size_t least_calls = 48;  // of a graph, so that the gap between two does not count
constexpr int host_calls = 50;
constexpr std::size_t host_bursts = 7;

const Table table({{"B", 3},
                   {"keys", 6},
                   {"heads", 6},
                   {"D", 4},
                   {"kernel", 10, true},
                   {"time", 10},
                   {"TB/s", 6},
                   {"of reading", 10},
                   {"bar", 10},
                   {"met", 3, true},
                   {"host", 8}});

// Random numbers, the same million again and again: as good as fresh ones for speed, and made in no time.
void fill_with_normal(const cases::DeviceMemory& memory, std::uint64_t seed) {
  const Array block = random_normal(Type::bf16, {1 << 20}, seed);
  for (std::size_t at = 0; at < memory.size(); at += block.bytes())
    memory.write(block.data<std::byte>(), std::min(block.bytes(), memory.size() - at), at);
}

// K and V of one layer.
struct Cache {
  cases::DeviceMemory k, v;

  Cache(const Decoding& row, std::uint64_t seed) :
      k(first_gpu, static_cast<std::size_t>(row.side_bytes())),
      v(first_gpu, static_cast<std::size_t>(row.side_bytes())) {
    fill_with_normal(k, seed), fill_with_normal(v, seed + 1);
  }
};

// One call over each cache: attention by a kernel, or reading.
struct Contender {
  std::string kernel;
  std::function<void(std::size_t cache, cuda::StreamHandle stream)> enqueue;
};

class Row {
 public:
  explicit Row(const Decoding& of) :
      row(of), q(random_normal(Type::bf16, {of.B, 1, of.Hq, of.D}, 1)), o(Type::bf16, {of.B, 1, of.Hq, of.D}) {
    for (std::int64_t n = 0; n < std::max<std::int64_t>(1, cold_bytes / row.bytes()); ++n)
      caches.push_back(std::make_unique<Cache>(row, 2 + 2 * static_cast<std::uint64_t>(n)));
  }

  // Null: the kernel that a call gets.
  void add(const char* kernel) {
    Execution execution{.device = first_gpu, .kernel = kernel};
    const auto plan = std::make_shared<const Plan>(Plan::forward(inputs(0), outputs(), {}, execution));
    if (std::ranges::any_of(contenders, [&](const Contender& c) { return c.kernel == plan->kernel(); })) return;
    const auto workspace = std::make_shared<const cases::DeviceMemory>(first_gpu, plan->workspace_size());
    execution.workspace = workspace->data(), execution.workspace_bytes = workspace->size();
    contenders.push_back({plan->kernel(), [this, plan, workspace, execution](std::size_t n, cuda::StreamHandle stream) {
                            Execution now = execution;
                            now.stream = stream;
                            plan->run(inputs(n), outputs(), {}, now);
                          }});
  }
  void add_reading() {
    contenders.push_back({"reading", [this](std::size_t n, cuda::StreamHandle stream) {
                            const std::int64_t side = row.side_bytes();
                            cuda::enqueue_read(first_gpu.id, stream, {caches[n]->k.data(), side},
                                               {caches[n]->v.data(), side}, static_cast<UInt32*>(found.data()));
                          }});
  }

  // Prints the contenders, in the end the one that only reads.
  void measure(int rounds, Json& json) const {
    std::vector<std::unique_ptr<GpuGraph>> graphs;
    const std::size_t calls = (least_calls + caches.size() - 1) / caches.size() * caches.size();
    for (const Contender& c : contenders)
      graphs.push_back(std::make_unique<GpuGraph>([&](cuda::StreamHandle stream) {
        for (std::size_t call = 0; call < calls; ++call) c.enqueue(call % caches.size(), stream);
      }));
    const GpuTimer timer;
    std::vector<double> last(graphs.size());
    for (std::size_t n = 0; n < graphs.size(); ++n) last[n] = timer.seconds([&] { graphs[n]->launch(); });
    const auto burst = [&](std::size_t n, double budget) {
      const int replays = std::max(1, static_cast<int>(std::ceil(budget / last[n])));
      last[n] = timer.seconds([&] {
        for (int r = 0; r < replays; ++r) graphs[n]->launch();
      }) / replays;
      return last[n] / static_cast<double>(calls);
    };
    Pace pace = gpu_pace;
    if (rounds > 0) pace.rounds = rounds;
    const std::vector<std::vector<double>> times = take_turns(graphs.size(), pace, burst);
    const double reading = median(times.back());
    for (std::size_t n = 0; n < times.size(); ++n)
      report(contenders[n], median(times[n]), reading, n + 1 < times.size(), json);
  }

 private:
  Inputs inputs(std::size_t n) const {
    const auto side = [&](const cases::DeviceMemory& memory) {
      return Tensor(memory.data(), Type::bf16, {row.B, row.keys, row.Hk, row.D}, first_gpu);
    };
    Inputs in;
    in.q = q.view(), in.k = side(caches[n]->k), in.v = side(caches[n]->v);
    return in;
  }
  Outputs outputs() const { return {.o = o.view(), .lse = {}}; }

  // Microseconds of the host for a call, which only enqueues.
  double host_microseconds(const Contender& c) const {
    std::vector<double> bursts;
    while (bursts.size() < host_bursts) {
      wait_for_gpu();
      bursts.push_back(seconds_of([&] {
        for (int call = 0; call < host_calls; ++call)
          c.enqueue(static_cast<std::size_t>(call) % caches.size(), nullptr);
      }));
    }
    wait_for_gpu();
    return median(bursts) / host_calls * 1e6;
  }

  void report(const Contender& c, double seconds, double reading, bool ours, Json& json) const {
    const double rate = static_cast<double>(row.bytes()) / seconds, host = ours ? host_microseconds(c) : 0;
    const bool met = seconds * 1e6 <= row.bar;
    std::fputs(table
                   .row({std::to_string(row.B), std::to_string(row.keys), format("%d/%d", int(row.Hq), int(row.Hk)),
                         std::to_string(row.D), c.kernel, time_text(seconds), format("%.2f", rate / 1e12),
                         format("%.3f", reading / seconds), ours ? format("%.1f us", row.bar) : "",
                         !ours ? ""
                         : met ? "yes"
                               : "no",
                         ours ? format("%.1f us", host) : ""})
                   .c_str(),
               stdout);
    std::fflush(stdout);
    Json line = {{"B", row.B},
                 {"keys", row.keys},
                 {"Hq", row.Hq},
                 {"Hk", row.Hk},
                 {"D", row.D},
                 {"kernel", c.kernel},
                 {"seconds", seconds},
                 {"tbytes", rate / 1e12},
                 {"of_reading", reading / seconds}};
    if (ours) line["bar"] = row.bar * 1e-6, line["met"] = met, line["host_seconds"] = host * 1e-6;
    json.push_back(line);
  }

  Decoding row;
  GpuArray q, o;
  cases::DeviceMemory found{first_gpu, sizeof(UInt32)};
  std::vector<std::unique_ptr<Cache>> caches;
  std::vector<Contender> contenders;
};

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
  for (const Decoding& shape : rows) {
    Row row(shape);
    row.add(chosen);
    if (!chosen) row.add("decode");
    row.add_reading();
    row.measure(a.repeat, json["rows"]);
  }
  std::printf(
      "\nMedians of rounds in which all take turns, each warmed up for %.0f ms and timed for %.0f ms by CUDA events\n"
      "around graphs of %zu calls or more. \"of reading\": the time of a kernel that only reads K and V over this "
      "one's.\n"
      "The bar is an H200's. \"host\": of a call that is not captured, launches included.\n",
      gpu_pace.warm * 1e3, gpu_pace.timed * 1e3, least_calls);
  save_json(a.json, json);
  return 0;
}

}  // namespace tessera::cli
