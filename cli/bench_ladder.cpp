// SPDX-License-Identifier: Apache-2.0
// `tessera bench --suite ladder` and `--suite gpu`: GPU kernels timed in turn, with CUDA events, or on a Vulkan device
// by wall clock. See cli/bench.hpp. Method: docs/benchmarks.md. Inputs are normally distributed: zeros would be faster
// and mean nothing.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>

#include "cli/bench.hpp"
#include "cli/failure.hpp"
#include "cli/gpu.hpp"
#include "cli/progress.hpp"
#include "cli/timing.hpp"
#include "cli/turns.hpp"

namespace tessera::cli {
namespace {

// The GPU that is asked for, and its simplest kernel, which is the baseline.
Device gpu_of(const BenchArguments& a) { return a.execution.device_name() == "vulkan" ? first_vulkan : first_gpu; }
void require_suite(const BenchArguments& a) {
  const char* device = a.execution.device_name() == "vulkan" ? " --device vulkan" : "";
  require_gpu("bench --suite " + a.suite + device, gpu_of(a));
}
const char* control(Device gpu) { return gpu.type == DeviceType::vulkan ? "vk_naive" : "naive"; }

constexpr double wanted_speedup = 8.5, wanted_over_full = 1.7;  // of the best kernel

// One kernel on one pass of one shape.
struct Contender {
  std::string kernel;
  bool causal;
  bool deterministic;
  GpuPass pass;
  double estimate = 0;  // seconds of a call
  std::vector<double> times{};

  // Of one call, from as many as take so many seconds.
  double measure(const GpuTimer& timer, double budget) {
    const int calls = estimate > 0 ? std::max(1, static_cast<int>(std::ceil(budget / estimate))) : 1;
    estimate = timer.seconds([&] {
      for (int call = 0; call < calls; ++call) pass.enqueue();
    }) / calls;
    return estimate;
  }
  double seconds() const { return median(times); }
};

// The tensors of a shape for both passes, one set per mask: the backward pass needs O and LSE of its own mask.
class Arena {
 public:
  Arena(const BenchShape& shape, Device gpu) : shape(shape) {
    const std::vector<std::int64_t> size{shape.B, shape.N, shape.H, shape.D};
    const Array q = random_normal(shape.type, size, 1), k = random_normal(shape.type, size, 2);
    const Array v = random_normal(shape.type, size, 3), d_o = random_normal(shape.type, size, 4);
    for (const bool causal : {false, true}) {
      tensors.push_back(std::make_unique<GpuAttention>(q, k, v, d_o, gpu));
      GpuPass(*tensors.back(), false, options(causal, true), nullptr).enqueue();
    }
    if (gpu.type == DeviceType::cuda) wait_for_gpu();
  }

  bool fits(const BenchShape& other) const {
    return shape.type == other.type && shape.B == other.B && shape.H == other.H && shape.N == other.N &&
           shape.D == other.D;
  }

  // A kernel that has no deterministic plan runs non-deterministically and is marked; a kernel without any plan is
  // omitted. only_best: only the first kernel that has a plan.
  std::vector<Contender> contenders(bool backward, const std::vector<std::string>& kernels, bool only_best,
                                    std::vector<std::string>& refusals) const {
    std::vector<Contender> all;
    for (const std::string& kernel : kernels) {
      if (only_best && !all.empty()) break;
      for (const bool causal : {false, true}) {
        std::string reason;
        for (const bool deterministic : {true, false}) {
          try {
            all.push_back({.kernel = kernel,
                           .causal = causal,
                           .deterministic = deterministic,
                           .pass = {*tensors[causal], backward, options(causal, deterministic), kernel.c_str()}});
            reason.clear();
            break;
          } catch (const Error& error) {
            if (error.status() != TESSERA_UNSUPPORTED) throw;
            reason = error.what();
          }
        }
        if (!reason.empty() && !only_best) refusals.push_back(reason);
      }
    }
    return all;
  }

 private:
  static Options options(bool causal, bool deterministic) {
    Options o;
    o.causal = causal, o.deterministic = deterministic;
    return o;
  }
  BenchShape shape;
  std::vector<std::unique_ptr<GpuAttention>> tensors;  // full, causal
};

void measure(std::vector<Contender>& all, int repeat, Device gpu) {
  const GpuTimer timer(gpu);
  for (Contender& one : all)
    for (int call = 0; call < 2; ++call) one.measure(timer, 0);  // the first call compiles, the second is an estimate
  Pace pace = gpu_pace;
  if (repeat > 0) pace.rounds = repeat;
  const auto times =
      take_turns(all.size(), pace, [&](std::size_t n, double budget) { return all[n].measure(timer, budget); });
  for (std::size_t n = 0; n < all.size(); ++n) all[n].times = times[n];
}

const Contender* find(const std::vector<Contender>& all, const std::string& kernel, bool causal) {
  for (const Contender& one : all)
    if (one.kernel == kernel && one.causal == causal) return &one;
  return nullptr;
}

const Table table({{"type", 4, true},
                   {"D", 4},
                   {"pass", 8, true},
                   {"mask", 6, true},
                   {"kernel", 11, true},
                   {"time", 10},
                   {"TFLOP/s", 8},
                   {"vs naive", 8},
                   {"naive TF/s", 10},
                   {"vs full", 7}});

// One line of the table. Figures that the kernel has no counterpart for are missing.
struct Row {
  BenchShape shape;
  std::string kernel;
  bool causal, deterministic;
  std::size_t runs;
  double seconds;
  std::optional<double> naive_seconds, over_naive, over_full;

  double rate(double in_seconds) const { return shape.operations(causal) / in_seconds; }

  std::string text() const {
    const auto ratio = [](const std::optional<double>& value) { return value ? format("%.2fx", *value) : ""; };
    return table.row({name_of(shape.type), std::to_string(shape.D), shape.pass(), causal ? "causal" : "full",
                      kernel + (deterministic ? "" : "*"), time_text(seconds), tflops_text(rate(seconds)),
                      ratio(over_naive), naive_seconds ? tflops_text(rate(*naive_seconds)) : "", ratio(over_full)});
  }

  Json json() const {
    Json json = {{"type", name_of(shape.type)},
                 {"B", shape.B},
                 {"H", shape.H},
                 {"N", shape.N},
                 {"D", shape.D},
                 {"pass", shape.pass()},
                 {"causal", causal},
                 {"kernel", kernel},
                 {"deterministic", deterministic},
                 {"runs", runs},
                 {"seconds", seconds},
                 {"tflops", rate(seconds) / 1e12}};
    if (over_naive) json["speedup_over_naive"] = *over_naive;
    if (naive_seconds) json["naive_tflops"] = rate(*naive_seconds) / 1e12;
    if (over_full) json["speedup_over_full"] = *over_full;
    return json;
  }
};

Row row_of(const BenchShape& shape, const Contender& one, const std::vector<Contender>& all, Device gpu) {
  Row row{.shape = shape,
          .kernel = one.kernel,
          .causal = one.causal,
          .deterministic = one.deterministic,
          .runs = one.times.size(),
          .seconds = one.seconds(),
          .naive_seconds = {},
          .over_naive = {},
          .over_full = {}};
  if (const Contender* naive = find(all, control(gpu), one.causal)) {
    row.naive_seconds = naive->seconds();
    row.over_naive = naive->seconds() / one.seconds();
  }
  if (const Contender* full = find(all, one.kernel, false); full && one.causal)
    row.over_full = full->seconds() / one.seconds();
  return row;
}

// Times every kernel on every shape; rows appear as they are measured.
std::vector<Row> measure_rows(const std::vector<BenchShape>& shapes, const std::vector<std::string>& kernels,
                              bool only_best, int repeat, Device gpu) {
  std::vector<Row> rows;
  std::vector<std::string> refusals;
  bool marked = false;
  std::unique_ptr<const Arena> arena;
  Progress progress(static_cast<double>(shapes.size()));
  progress.hide();
  std::fputs(table.heading().c_str(), stdout);
  for (const BenchShape& shape : shapes) {
    progress.step(format("%s D=%lld %s", name_of(shape.type), static_cast<long long>(shape.D), shape.pass()));
    if (!arena || !arena->fits(shape)) arena = std::make_unique<const Arena>(shape, gpu);
    std::vector<Contender> all = arena->contenders(shape.backward, kernels, only_best, refusals);
    measure(all, repeat, gpu);
    progress.hide();
    for (const bool causal : {false, true})
      for (const Contender& one : all)
        if (one.causal == causal) {
          rows.push_back(row_of(shape, one, all, gpu));
          std::fputs(rows.back().text().c_str(), stdout);
          marked = marked || !one.deterministic;
        }
    std::fflush(stdout);
    progress.advance(1);
  }
  progress.hide();
  if (marked) std::printf("* with deterministic = false; its bits may vary between runs\n");
  std::sort(refusals.begin(), refusals.end());
  refusals.erase(std::unique(refusals.begin(), refusals.end()), refusals.end());
  for (const std::string& reason : refusals) std::printf("left out: %s\n", reason.c_str());
  return rows;
}

// The minimum of one figure over a kernel's f32 rows, beside the goal.
Json print_verdict(const char* what, const std::vector<Row>& rows, const std::string& kernel,
                   std::optional<double> Row::*figure, double wanted) {
  const Row* worst = nullptr;
  for (const Row& row : rows)
    if (row.kernel == kernel && row.shape.type == Type::f32 && row.*figure &&
        (!worst || *(row.*figure) < *(worst->*figure)))
      worst = &row;
  if (!worst) return {{"wanted", wanted}, {"met", false}};
  const double value = *(worst->*figure);
  const bool met = value >= wanted;
  std::string where =
      format("D=%d %s %s", static_cast<int>(worst->shape.D), worst->shape.pass(), worst->causal ? "causal" : "full");
  if (figure == &Row::over_naive)
    where += ", where naive reaches " + tflops_text(worst->rate(*worst->naive_seconds)) + " TFLOP/s";
  std::printf("%s: at least %.2fx (%s); %.1fx wanted: %s\n", what, value, where.c_str(), wanted,
              met ? "met" : "NOT met");
  return {{"smallest", value}, {"wanted", wanted}, {"met", met}, {"where", where}};
}

void print_method(const BenchShape& shape, Device gpu) {
  std::printf("\nB=%lld H=%lld N=%lld. ", static_cast<long long>(shape.B), static_cast<long long>(shape.H),
              static_cast<long long>(shape.N));
  if (gpu.type == DeviceType::vulkan)
    std::printf("N is 4096 where the device is fast enough. Medians by wall clock, from a call to its fence;\n");
  else
    std::printf("Medians by CUDA events;\n");
  std::printf(
      "kernels and masks in turn, each after 80 ms of warm-up. Operations: 4 B H N N D forward, 2.5 times that "
      "backward,\n"
      "half of it causal. \"vs full\": how much less time causal takes than full.\n");
}

Json report(const BenchArguments& a, const std::vector<Row>& rows) {
  Json json;
  json["machine"] = machine();
  json["gpu"] = gpu_name(gpu_of(a));
  json["suite"] = a.suite;
  json["rows"] = Json::array();
  for (const Row& row : rows) json["rows"].push_back(row.json());
  return json;
}

std::vector<BenchShape> ladder_shapes(const BenchArguments& a, Device gpu) {
  std::vector<BenchShape> shapes;
  if (a.suite == "tiny") {
    for (const bool backward : {false, true})
      shapes.push_back({.type = Type::f32, .N = 64, .D = 64, .backward = backward, .B = 1, .H = 1});
    return shapes;
  }
  const std::int64_t N = fitting_tokens(2, 8, 64, gpu);
  for (const std::int64_t D : {64, 128})
    for (const bool backward : {false, true})
      shapes.push_back({.type = Type::f32, .N = N, .D = D, .backward = backward, .B = 2, .H = 8});
  // Kernels that take 16-bit types only are rows of the same table.
  for (const std::int64_t D : {64, 128})
    shapes.push_back({.type = Type::bf16, .N = N, .D = D, .backward = false, .B = 2, .H = 8});
  return shapes;
}

}  // namespace

int bench_ladder(const BenchArguments& a) {
  const Device gpu = gpu_of(a);
  require_suite(a);
  std::vector<std::string> kernels = gpu_kernels(Type::bf16, gpu);
  const char* chosen = a.execution.execution().kernel;
  if (chosen && std::find(kernels.begin(), kernels.end(), chosen) == kernels.end())
    throw Failure(format("kernel: is '%s', which does not run on the GPU.", chosen));
  if (chosen) std::erase_if(kernels, [&](const std::string& name) { return name != chosen && name != control(gpu); });
  std::printf("%s\n\n", gpu_name(gpu).c_str());
  const std::vector<BenchShape> shapes = ladder_shapes(a, gpu);
  const std::vector<Row> rows = measure_rows(shapes, kernels, false, a.repeat, gpu);
  print_method(shapes.front(), gpu);
  if (gpu.type == DeviceType::vulkan || a.suite == "tiny") {
    save_json(a.json, report(a, rows));
    return 0;
  }
  const std::string best = rows.front().kernel;  // of those that take f32
  std::printf("\n");
  Json json = report(a, rows);
  json["verdicts"] = {
      {"over_naive", print_verdict((best + " over naive").c_str(), rows, best, &Row::over_naive, wanted_speedup)},
      {"causal_over_full",
       print_verdict((best + ", causal over full").c_str(), rows, best, &Row::over_full, wanted_over_full)}};
  json["repeated_call"] = measure_repeated_calls();
  json["first_call"] = measure_first_calls();
  save_json(a.json, json);
  return 0;
}

int bench_gpu(const BenchArguments& a) {
  const Device gpu = gpu_of(a);
  require_suite(a);
  const char* chosen = a.execution.execution().kernel;
  const std::vector<std::string> kernels = chosen ? std::vector<std::string>{chosen} : gpu_kernels(Type::bf16, gpu);
  const std::int64_t N = fitting_tokens(2, 16, 64, gpu);
  std::vector<BenchShape> shapes;
  for (const Type type : {Type::f32, Type::f16, Type::bf16})
    for (const std::int64_t D : {64, 128})
      for (const bool backward : {false, true})
        shapes.push_back({.type = type, .N = N, .D = D, .backward = backward, .B = 2, .H = 16});
  std::printf("%s\n\n", gpu_name(gpu).c_str());
  const std::vector<Row> rows = measure_rows(shapes, kernels, true, a.repeat, gpu);
  print_method(shapes.front(), gpu);
  save_json(a.json, report(a, rows));
  return 0;
}

}  // namespace tessera::cli
