// SPDX-License-Identifier: Apache-2.0
// `tessera bench`: the speed of the kernels as a share of this machine's peak rate (FMA on registers), measured in the
// same run. Method: docs/benchmarks.md. Inputs are normally distributed: zeros would be faster and mean nothing.
#include <algorithm>
#include <cstdio>
#include <memory>

#include "cases/suite.hpp"
#include "cli/array.hpp"
#include "cli/bench.hpp"
#include "cli/bench_pass.hpp"
#include "cli/command.hpp"
#include "cli/failure.hpp"
#include "cli/files.hpp"
#include "cli/flags.hpp"
#include "cli/progress.hpp"
#include "cli/rates.hpp"
#include "cli/timing.hpp"
#include "core/processor.hpp"
#include "tessera/tessera.hpp"

namespace tessera::cli {
namespace {

struct Measured {
  double full = 0, causal = 0;  // seconds, medians
  double fma = 0;               // operations per second, median of the same rounds
  double limit = 0;             // likewise, of the unit that runs the kernel's matrix products
  int runs = 0;
  std::string kernel;
  const char* limit_name = "";
};

// The unit that runs a kernel's matrix products: vector FMA, bf16 dot products or AMX.
struct Unit {
  const char* name;
  double (*rate)(int threads, double seconds);
};
Unit unit_of(const std::string& kernel, Type type) {
  if (kernel == "amx") return {"AMX", measure_matrix_rate};
  if (kernel == "avx512bf16" && type == Type::bf16) return {"BF16", measure_pairs_rate};
  return {"FMA", nullptr};
}

std::vector<BenchShape> shapes_of(const std::string& suite) {
  std::vector<BenchShape> shapes;
  const auto both = [&](Type type, std::int64_t N, std::int64_t D) {
    shapes.push_back({type, N, D, false});
    shapes.push_back({type, N, D, true});
  };
  if (suite == "tiny") both(Type::f32, 128, 64);
  if (suite == "cpu")
    for (const cases::Case& row : cases::suite("performance"))
      if (!row.options.causal) both(row.type, row.Nq, row.D);  // causal is measured beside full
  return shapes;
}

constexpr int least_rounds = 7, most_rounds = 1000;
constexpr double least_seconds = 0.6;

// A guess of the seconds that a row takes, for the progress line: FMA rate, full and causal at 100 GF/s.
double expected_seconds(const BenchShape& shape) {
  return std::max(2 * least_seconds, least_rounds * 2.5 * shape.operations() / 100e9);
}

// Interleaved rounds of FMA rate, full and causal: another program that slows one of them down slows all of them down.
Measured measure(const BenchShape& shape, const BenchArguments& a, Progress& progress) {
  BenchPass bench(shape, a.execution.execution());
  const Unit unit = unit_of(bench.kernel(), shape.type);
  std::vector<double> full, causal, fma, limit;
  double sum = 0;
  const auto enough = [&] {
    const int rounds = static_cast<int>(full.size());
    if (a.repeat > 0) return rounds >= a.repeat;
    return (rounds >= least_rounds && sum >= least_seconds) || rounds >= most_rounds;
  };
  while (!enough()) {
    // As long as the measurement that it is compared with: on a busy machine a short burst may run between the other
    // programs.
    const double burst = full.empty() ? 0.01 : std::clamp(full.back(), 0.01, 0.25);
    fma.push_back(measure_fma_rate(a.execution.threads(), burst));
    limit.push_back(unit.rate ? unit.rate(a.execution.threads(), burst) : fma.back());
    full.push_back(seconds_of([&] { bench.run(false); }));
    causal.push_back(seconds_of([&] { bench.run(true); }));
    sum += full.back() + causal.back();
    const int expected = a.repeat > 0 ? a.repeat : least_rounds;
    if (static_cast<int>(full.size()) <= expected) progress.advance(expected_seconds(shape) / expected);
  }
  return {median(full),   median(causal), median(fma), median(limit), static_cast<int>(full.size()),
          bench.kernel(), unit.name};
}

const Table table({{"type", 4, true},
                   {"N", 5},
                   {"D", 4},
                   {"pass", 8, true},
                   {"mask", 6, true},
                   {"kernel", 10, true},
                   {"time", 10},
                   {"GF/s", 7},
                   {"of FMA", 6},
                   {"vs full", 7},
                   {"of the limit", share_width, true}});

void report_row(const BenchShape& shape, const Measured& m, bool causal, Json& rows) {
  const double seconds = causal ? m.causal : m.full;
  const double rate = shape.operations(causal) / seconds;
  const char *pass = shape.pass(), *mask = causal ? "causal" : "full";
  const std::string line = table.row({name_of(shape.type), std::to_string(shape.N), std::to_string(shape.D), pass, mask,
                                      m.kernel, time_text(seconds), format("%.1f", rate / 1e9),
                                      format("%.2f", rate / m.fma), causal ? format("%.2fx", m.full / m.causal) : "",
                                      share_text(rate / m.limit) + format(" of %s %.0f", m.limit_name, m.limit / 1e9)});
  std::fputs(line.c_str(), stdout);
  Json row = {{"type", name_of(shape.type)},
              {"B", shape.B},
              {"H", shape.H},
              {"N", shape.N},
              {"D", shape.D},
              {"pass", pass},
              {"causal", causal},
              {"kernel", m.kernel},
              {"runs", m.runs},
              {"seconds", seconds},
              {"gflops", rate / 1e9},
              {"fma_gflops", m.fma / 1e9},
              {"of_fma", rate / m.fma},
              {"limit", m.limit_name},
              {"limit_gflops", m.limit / 1e9},
              {"of_limit", rate / m.limit}};
  if (causal) row["speedup_over_full"] = m.full / m.causal;
  rows.push_back(row);
}

int bench_cpu(const BenchArguments& a) {
  const std::vector<BenchShape> shapes = shapes_of(a.suite);
  double total = 0;
  for (const BenchShape& shape : shapes) total += expected_seconds(shape);
  const int threads = a.execution.threads();
  Progress progress(total);
  progress.step("FMA rate");
  std::vector<double> rates;
  for (int i = 0; i < 5; ++i) rates.push_back(measure_fma_rate(threads, 0.05));

  Json json;
  json["machine"] = machine();
  json["suite"] = a.suite;
  json["threads"] = threads;
  json["fma_gflops"] = median(rates) / 1e9;
  json["rows"] = Json::array();
  progress.hide();
  std::printf("%s, %d threads, B=1 H=8; registers alone reach %.1f GF/s (FMA)\n\n", processor().c_str(), threads,
              median(rates) / 1e9);
  std::fputs(table.heading().c_str(), stdout);
  for (const BenchShape& shape : shapes) {
    progress.step(format("%s N=%lld D=%lld %s", name_of(shape.type), static_cast<long long>(shape.N),
                         static_cast<long long>(shape.D), shape.pass()));
    const Measured measured = measure(shape, a, progress);
    progress.hide();
    for (const bool causal : {false, true}) report_row(shape, measured, causal, json["rows"]);
    std::fflush(stdout);
  }
  std::printf(
      "\nMedians. Operations: 4 B H N N D forward, 2.5 times that backward, half of it causal. \"of FMA\": share of "
      "the\n"
      "register-only FMA rate of as many threads, measured between the runs of the same row. \"vs full\": how much "
      "less\n"
      "time causal takes than full. The limit: what the part of the processor that does the products reaches alone "
      "(FMA in\n"
      "f32; dot products of bf16 pairs; AMX in bf16, of which a product of f16 takes three or four and one of f32 "
      "six).\n");
  if (a.suite == "cpu") json["decoding"] = bench_decode(a);
  save_json(a.json, json);
  return 0;
}

// The suite for the device: each runs on the CPU or on a GPU, and not all of those on Vulkan devices.
void choose_suite(BenchArguments& a) {
  const std::string& device = a.execution.device_name();
  const bool gpu = device == "cuda" || device == "vulkan";
  if (a.suite.empty()) a.suite = gpu ? "ladder" : "cpu";
  const bool for_cpu = a.suite == "cpu" || a.suite == "scaling";
  const bool for_vulkan = a.suite == "tiny" || a.suite == "ladder" || a.suite == "gpu";
  if ((device == "vulkan" && !for_vulkan) || (device == "cuda" && for_cpu))
    throw Failure(format("bench --suite %s does not run on --device %s; tiny, ladder and gpu do.", a.suite.c_str(),
                         device.c_str()));
}

int bench(BenchArguments& a) {
  choose_suite(a);
  require_place(a.json);
  const std::string& device = a.execution.device_name();
  if (a.suite == "ladder" || (a.suite == "tiny" && (device == "cuda" || device == "vulkan"))) return bench_ladder(a);
  if (a.suite == "gpu") return bench_gpu(a);
  if (a.suite == "decode") return bench_gpu_decode(a);
  if (a.suite == "first-call") return bench_first_call(a);
  if (a.suite == "scaling") return bench_scaling(a);
  return bench_cpu(a);
}

}  // namespace

std::string share_text(double share) {
  const auto full = static_cast<std::size_t>(std::clamp(share, 0.0, 1.0) * 10 + 0.5);
  return std::string(full, '#') + std::string(10 - full, '.') + format(" %.2f", share);
}

Action add_bench(CLI::App& program) {
  auto arguments = std::make_shared<BenchArguments>();
  BenchArguments& a = *arguments;
  CLI::App& command =
      add_command(program, "bench", "Speed, beside what this machine's registers can do; on a GPU, kernel by kernel",
                  "Examples:\n"
                  "  tessera bench --threads 2\n"
                  "  tessera bench --kernel avx2 --json bench.json\n"
                  "  tessera bench --suite ladder --json ladder.json\n"
                  "  tessera bench --device vulkan");
  add_flag(command, "--suite",
           "cpu (the default), scaling (one thread against --threads), tiny to see that it works; on a GPU: ladder "
           "(every kernel; the default with --device cuda or vulkan), gpu (the best one in every type), and with CUDA "
           "decode "
           "(one query, by the best kernel and by `decode`, beside reading alone), first-call (what compiling costs "
           "this process)",
           a.suite, {.value = "NAME", .choices = {"cpu", "scaling", "tiny", "ladder", "gpu", "decode", "first-call"}});
  add_flag(command, "--repeat", "Runs per row (default: 7 or more, until 0.6 seconds are measured)", a.repeat,
           {.value = "N", .least = 1, .most = 1e6});
  add_json_flag(command, a.json);
  a.execution.add_to(command);
  return [arguments] { return bench(*arguments); };
}

}  // namespace tessera::cli
