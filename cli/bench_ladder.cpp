// `tessera bench --suite ladder` and `--suite gpu`: GPU kernels timed with CUDA events, in turn. See
// cli/bench.hpp. Method: docs/benchmarks.md. Inputs are normally distributed: zeros would be faster and mean nothing.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "cli/bench.hpp"
#include "cli/failure.hpp"
#include "cli/gpu.hpp"
#include "cli/progress.hpp"
#include "cli/timing.hpp"
#include "cli/turns.hpp"

namespace tessera::cli {
namespace {

constexpr const char* control = "naive";                        // the baseline
constexpr const char* over_control = "speedup_over_naive";      // as JSON names it
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
  explicit Arena(const BenchShape& shape) : shape(shape) {
    const std::vector<std::int64_t> size{shape.B, shape.N, shape.H, shape.D};
    const Array q = random_normal(shape.type, size, 1), k = random_normal(shape.type, size, 2);
    const Array v = random_normal(shape.type, size, 3), d_o = random_normal(shape.type, size, 4);
    for (const bool causal : {false, true}) {
      tensors.push_back(std::make_unique<GpuAttention>(q, k, v, d_o));
      GpuPass(*tensors.back(), false, options(causal, true), nullptr).enqueue();
    }
    wait_for_gpu();
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

void measure(std::vector<Contender>& all, int repeat) {
  const GpuTimer timer;
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

Json report_row(const BenchShape& shape, const Contender& one, const std::vector<Contender>& all) {
  const Contender *full = find(all, one.kernel, false), *naive = find(all, control, one.causal);
  const double rate = shape.operations(one.causal) / one.seconds();
  Json row = {{"type", name_of(shape.type)},
              {"B", shape.B},
              {"H", shape.H},
              {"N", shape.N},
              {"D", shape.D},
              {"pass", shape.pass()},
              {"causal", one.causal},
              {"kernel", one.kernel},
              {"deterministic", one.deterministic},
              {"runs", one.times.size()},
              {"seconds", one.seconds()},
              {"tflops", rate / 1e12}};
  std::string ratio, naive_rate, over_full;
  if (naive) {
    row[over_control] = naive->seconds() / one.seconds();
    row["naive_tflops"] = shape.operations(one.causal) / naive->seconds() / 1e12;
    ratio = format("%.2fx", row[over_control].get<double>());
    naive_rate = format("%.2f", row["naive_tflops"].get<double>());
  }
  if (one.causal && full) {
    row["speedup_over_full"] = full->seconds() / one.seconds();
    over_full = format("%.2fx", row["speedup_over_full"].get<double>());
  }
  const std::string line =
      table.row({name_of(shape.type), std::to_string(shape.D), shape.pass(), one.causal ? "causal" : "full",
                 one.kernel + (one.deterministic ? "" : "*"), time_text(one.seconds()), format("%.2f", rate / 1e12),
                 ratio, naive_rate, over_full});
  std::fputs(line.c_str(), stdout);
  return row;
}

// Times every kernel on every shape; rows appear as they are measured.
Json measure_rows(const std::vector<BenchShape>& shapes, const std::vector<std::string>& kernels, bool only_best,
                  int repeat) {
  Json rows = Json::array();
  std::vector<std::string> refusals;
  bool marked = false;
  std::unique_ptr<const Arena> arena;
  Progress progress(static_cast<double>(shapes.size()));
  progress.hide();
  std::fputs(table.heading().c_str(), stdout);
  for (const BenchShape& shape : shapes) {
    progress.step(format("%s D=%lld %s", name_of(shape.type), static_cast<long long>(shape.D), shape.pass()));
    if (!arena || !arena->fits(shape)) arena = std::make_unique<const Arena>(shape);
    std::vector<Contender> all = arena->contenders(shape.backward, kernels, only_best, refusals);
    measure(all, repeat);
    progress.hide();
    for (const bool causal : {false, true})
      for (const Contender& one : all)
        if (one.causal == causal) {
          rows.push_back(report_row(shape, one, all));
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
Json print_verdict(const char* what, const Json& rows, const std::string& kernel, const char* figure, double wanted) {
  const Json* worst = nullptr;
  for (const Json& row : rows)
    if (row["kernel"] == kernel && row["type"] == "f32" && row.contains(figure) &&
        (!worst || row[figure] < (*worst)[figure]))
      worst = &row;
  if (!worst) return {{"wanted", wanted}, {"met", false}};
  const double value = (*worst)[figure].get<double>();
  const bool met = value >= wanted;
  std::string where = format("D=%d %s %s", (*worst)["D"].get<int>(), (*worst)["pass"].get<std::string>().c_str(),
                             (*worst)["causal"].get<bool>() ? "causal" : "full");
  if (std::string(figure) == over_control)
    where += format(", where %s reaches %.2f TFLOP/s", control, (*worst)["naive_tflops"].get<double>());
  std::printf("%s: at least %.2fx (%s); %.1fx wanted: %s\n", what, value, where.c_str(), wanted,
              met ? "met" : "NOT met");
  return {{"smallest", value}, {"wanted", wanted}, {"met", met}, {"where", where}};
}

void print_method(const BenchShape& shape) {
  std::printf(
      "\nB=%lld H=%lld N=%lld. Medians by CUDA events; kernels and masks in turn, each after 80 ms of warm-up. "
      "Operations:\n"
      "4 B H N N D forward, 2.5 times that backward, half of it causal. \"vs full\": how much less time causal takes "
      "than\n"
      "full.\n",
      static_cast<long long>(shape.B), static_cast<long long>(shape.H), static_cast<long long>(shape.N));
}

Json header(const BenchArguments& a) {
  Json json;
  json["machine"] = machine();
  json["gpu"] = gpu_name();
  json["suite"] = a.suite;
  return json;
}

}  // namespace

int bench_ladder(const BenchArguments& a) {
  require_gpu("bench --suite ladder");
  std::vector<std::string> kernels = gpu_kernels(Type::bf16);
  const char* chosen = a.execution.execution().kernel;
  if (chosen && std::find(kernels.begin(), kernels.end(), chosen) == kernels.end())
    throw Failure(format("kernel: is '%s', which does not run on the GPU.", chosen));
  if (chosen) std::erase_if(kernels, [&](const std::string& name) { return name != chosen && name != control; });
  std::vector<BenchShape> shapes;
  for (const std::int64_t D : {64, 128})
    for (const bool backward : {false, true})
      shapes.push_back({.type = Type::f32, .N = 4096, .D = D, .backward = backward, .B = 2, .H = 8});
  // Kernels that take 16-bit types only are rows of the same table.
  for (const std::int64_t D : {64, 128})
    shapes.push_back({.type = Type::bf16, .N = 4096, .D = D, .backward = false, .B = 2, .H = 8});

  Json json = header(a);
  std::printf("%s\n\n", gpu_name().c_str());
  json["rows"] = measure_rows(shapes, kernels, false, a.repeat);
  print_method(shapes.front());
  const std::string best = json["rows"].front()["kernel"];  // of those that take f32
  std::printf("\n");
  json["verdicts"] = {{"over_naive", print_verdict((best + " over " + control).c_str(), json["rows"], best,
                                                   over_control, wanted_speedup)},
                      {"causal_over_full", print_verdict((best + ", causal over full").c_str(), json["rows"], best,
                                                         "speedup_over_full", wanted_over_full)}};
  json["repeated_call"] = measure_repeated_calls();
  json["first_call"] = measure_first_calls();
  save_json(a.json, json);
  return 0;
}

int bench_gpu(const BenchArguments& a) {
  require_gpu("bench --suite gpu");
  const char* chosen = a.execution.execution().kernel;
  const std::vector<std::string> kernels = chosen ? std::vector<std::string>{chosen} : gpu_kernels(Type::bf16);
  std::vector<BenchShape> shapes;
  for (const Type type : {Type::f32, Type::f16, Type::bf16})
    for (const std::int64_t D : {64, 128})
      for (const bool backward : {false, true})
        shapes.push_back({.type = type, .N = 4096, .D = D, .backward = backward, .B = 2, .H = 16});
  Json json = header(a);
  std::printf("%s\n\n", gpu_name().c_str());
  json["rows"] = measure_rows(shapes, kernels, true, a.repeat);
  print_method(shapes.front());
  save_json(a.json, json);
  return 0;
}

}  // namespace tessera::cli
