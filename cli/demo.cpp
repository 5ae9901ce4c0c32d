// SPDX-License-Identifier: Apache-2.0
// `tessera demo`: a small problem whose numbers can be followed, then a realistic one against unfused attention.
// The small problem is ancestor B's; its story is told in docs/numerics.md.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>

#include "cases/ancestor_b.hpp"
#include "cli/array.hpp"
#include "cli/command.hpp"
#include "cli/files.hpp"
#include "cli/flags.hpp"
#include "cli/gpu.hpp"
#include "cli/isa.hpp"
#include "cli/options.hpp"
#include "cli/progress.hpp"
#include "cli/report.hpp"
#include "cli/timing.hpp"
#include "cli/unfused.hpp"
#include "tessera/tessera.hpp"

namespace tessera::cli {
namespace {

struct Arguments {
  ExecutionFlags execution;
  std::string json;
  bool small = false;
  std::optional<Device> gpu{};  // chosen by choose_device
};

// CUDA's GPU, if there is one, unless the command line says something else. Says in a line why there is none.
void choose_device(Arguments& a) {
  const char* kernel = a.execution.execution().kernel;
  const std::string &device = a.execution.device_name(), missing = missing_gpu();
  require_device("demo", device);
  if (device == "vulkan") {
    a.gpu = first_vulkan;
    std::printf("On a Vulkan device: %s.\n", gpu_name(first_vulkan).c_str());
    return;
  }
  if (device.empty() && !kernel && !missing.empty()) std::printf("On the CPU: %s.\n", missing.c_str());
  if (device == "cpu" || !missing.empty()) return;
  const std::vector<std::string> kernels = gpu_kernels();
  if (device != "cuda" && kernel && std::find(kernels.begin(), kernels.end(), kernel) == kernels.end()) return;
  a.gpu = first_gpu;
  std::printf("On the GPU: %s.\n", gpu_name().c_str());
}

// The tensors of one self-attention problem, forward and backward, in one type.
struct Attention {
  Array q, k, v, d_o, o, lse, dq, dk, dv;
  Options options{};
  Execution execution{};

  Attention(Array q_, Array k_, Array v_, Array d_o_) :
      q(std::move(q_)), k(std::move(k_)), v(std::move(v_)), d_o(std::move(d_o_)) {
    for (Array* array : {&o, &dq, &dk, &dv}) *array = Array(q.type(), q.shape());
    const auto& n = q.shape();
    lse = Array(q.type() == Type::f64 ? Type::f64 : Type::f32, {n[0], n[2], n[1]});
  }

  Inputs inputs() const {
    Inputs in;
    in.q = q.view(), in.k = k.view(), in.v = v.view();
    return in;
  }
  Outputs outputs() const { return {.o = o.view(), .lse = lse.view()}; }
  Saved saved() const { return {.o = o.view(), .lse = lse.view(), .d_o = d_o.view(), .d_lse = {}}; }
  Gradients gradients() const { return {.dq = dq.view(), .dk = dk.view(), .dv = dv.view(), .dbias = {}, .dsinks = {}}; }

  void forward() const { tessera::forward(inputs(), outputs(), options, execution); }
  void backward() const { tessera::backward(inputs(), saved(), gradients(), options, execution); }
};

// --- ancestor B ------------------------------------------------------------------------------------------------------

Array array_of(const std::vector<float>& values, std::vector<std::int64_t> shape) {
  Array array(Type::f32, std::move(shape));
  std::memcpy(array.data<float>(), values.data(), array.bytes());
  return array;
}

Json print_corner(const char* name, const Array& array) {
  const std::int64_t D = array.shape().back();
  Json rows;
  for (std::int64_t i = 0; i < 3; ++i) {
    std::string line = format("  %-3s", i == 0 ? name : "");
    Json row;
    for (std::int64_t d = 0; d < 3; ++d) {
      line += format(" %13s", format("%.6g", array.at(i * D + d)).c_str());
      row.push_back(array.at(i * D + d));
    }
    std::printf("%s\n", line.c_str());
    rows.push_back(row);
  }
  return rows;
}

Json print_error(const char* name, const Array& got, const Array& exact) {
  double worst = 0, difference = 0, norm = 0;
  for (std::int64_t i = 0; i < got.elements(); ++i) {
    const double d = got.at(i) - exact.at(i);
    worst = std::max(worst, std::abs(d));
    difference += d * d;
    norm += exact.at(i) * exact.at(i);
  }
  const double relative = std::sqrt(difference / norm);
  std::printf("  %-4s %12.3e %12.3e\n", name, worst, relative);
  return {{"worst", worst}, {"relative", relative}};
}

struct Latency {
  double forward, backward;
};

Latency run_on_cpu(const Attention& x) {
  const double forward = median_seconds([&] { x.forward(); }, 50, 0.05);
  return {forward, median_seconds([&] { x.backward(); }, 50, 0.05)};
}

// Times the passes and copies the results back.
Latency run_on_gpu(Attention& x, const char* kernel, Device device) {
  const int runs = device.type == DeviceType::cuda ? 50 : 15;
  const GpuAttention gpu(x.q, x.k, x.v, x.d_o, device);
  const GpuPass forward(gpu, false, x.options, kernel), backward(gpu, true, x.options, kernel);
  const GpuTimer timer(device);
  const double forward_seconds = timer.median_seconds([&] { forward.enqueue(); }, runs);
  const Latency latency{forward_seconds, timer.median_seconds([&] { backward.enqueue(); }, runs)};
  gpu.o.read(x.o), gpu.lse.read(x.lse), gpu.dq.read(x.dq), gpu.dk.read(x.dk), gpu.dv.read(x.dv);
  return latency;
}

Json small_problem(const Arguments& a) {
  const cases::AncestorB in = cases::ancestor_b();
  const std::vector<std::int64_t> shape{1, in.N, 1, in.D};
  Attention f32(array_of(in.Q, shape), array_of(in.K, shape), array_of(in.V, shape), array_of(in.dO, shape));
  f32.execution = a.execution.execution();
  const auto [forward, backward] = a.gpu ? run_on_gpu(f32, f32.execution.kernel, *a.gpu) : run_on_cpu(f32);
  Attention f64(converted(f32.q, Type::f64), converted(f32.k, Type::f64), converted(f32.v, Type::f64),
                converted(f32.d_o, Type::f64));
  f64.execution.kernel = "reference";
  f64.forward();
  f64.backward();

  Json json;
  std::printf("128 tokens x 32 dims, f32, one head. Upper left corners:\n");
  for (auto [name, array] : {std::pair{"Q", &f32.q},
                             {"K", &f32.k},
                             {"V", &f32.v},
                             {"O", &f32.o},
                             {"dQ", &f32.dq},
                             {"dK", &f32.dk},
                             {"dV", &f32.dv}})
    json["corners"][name] = print_corner(name, *array);
  std::printf("\nLatency (median): forward %s, backward %s, total %s\n", time_text(forward).c_str(),
              time_text(backward).c_str(), time_text(forward + backward).c_str());
  json["seconds"] = {{"forward", forward}, {"backward", backward}, {"total", forward + backward}};
  std::printf("\nError against float64:\n  %-4s %12s %12s\n", "", "worst", "relative");
  for (auto [name, got, exact] : {std::tuple{"O", &f32.o, &f64.o},
                                  {"LSE", &f32.lse, &f64.lse},
                                  {"dQ", &f32.dq, &f64.dq},
                                  {"dK", &f32.dk, &f64.dk},
                                  {"dV", &f32.dv, &f64.dv}})
    json["errors"][name] = print_error(name, *got, *exact);
  return json;
}

// --- the realistic problem -------------------------------------------------------------------------------------------

constexpr std::int64_t heads = 8, tokens = 4096, dim = 64;
constexpr std::size_t rounds = 5;

std::size_t available_memory() {
  std::ifstream in("/proc/meminfo");
  std::string name, unit;
  for (std::size_t kilobytes = 0; in >> name >> kilobytes; std::getline(in, unit))
    if (name == "MemAvailable:") return kilobytes * 1024;
  return static_cast<std::size_t>(-1);
}

struct Figures {
  double forward = 0, backward = 0;
  std::size_t forward_bytes = 0, backward_bytes = 0;

  Json json() const {
    return {{"forward_seconds", forward},
            {"backward_seconds", backward},
            {"forward_bytes", forward_bytes},
            {"backward_bytes", backward_bytes}};
  }
};

// One of the calls that are measured in interleaved rounds: other load on the machine then slows all of them down
// alike.
struct Timed {
  const char* name;
  double weight;  // share of the work, for the progress line
  std::function<void()> call;
  std::vector<double> times{};
};

void measure_in_turn(std::vector<Timed>& calls, Progress& progress) {
  for (std::size_t round = 0; round <= rounds; ++round)
    for (Timed& timed : calls) {
      progress.step(timed.name);
      const double seconds = seconds_of(timed.call);
      if (round > 0) timed.times.push_back(seconds);  // the first one warms up
      progress.advance(timed.weight);
    }
}

// The largest difference between two results.
double difference(const Array& a, const Array& b) {
  double worst = 0;
  for (std::int64_t i = 0; i < a.elements(); ++i) worst = std::max(worst, std::abs(a.at(i) - b.at(i)));
  return worst;
}

std::size_t fused_bytes(const Attention& x, bool backward) {
  // LSE exists only for the backward pass: it counts too.
  if (!backward) return x.lse.bytes() + Plan::forward(x.inputs(), x.outputs(), x.options, x.execution).workspace_size();
  return x.lse.bytes() + Plan::backward(x.inputs(), x.saved(), x.gradients(), x.options, x.execution).workspace_size();
}

void print_comparison(const Figures& ours, const Figures& plain) {
  const Table table(
      {{"", 10, true}, {"tessera", 12}, {"unfused", 12}, {"speed-up", 9}, {"extra memory", 12}, {"unfused", 12}});
  std::fputs(table.heading().c_str(), stdout);
  const auto row = [&](const char* name, double a, double b, std::size_t a_bytes, std::size_t b_bytes) {
    const std::string line =
        table.row({name, time_text(a), time_text(b), format("%.2fx", b / a), bytes_text(a_bytes), bytes_text(b_bytes)});
    std::fputs(line.c_str(), stdout);
  };
  row("  forward", ours.forward, plain.forward, ours.forward_bytes, plain.forward_bytes);
  row("  backward", ours.backward, plain.backward, ours.backward_bytes, plain.backward_bytes);
  row("  both", ours.forward + ours.backward, plain.forward + plain.backward,
      std::max(ours.forward_bytes, ours.backward_bytes), std::max(plain.forward_bytes, plain.backward_bytes));
}

// Tessera against unfused attention; `other` receives the latter's results, `json` the figures.
void compare(const Attention& x, Attention& other, const UnfusedProblem& problem, Json& json) {
  Unfused plain(problem);
  const auto f32 = [](Array& array) { return array.data<float>(); };
  std::vector<Timed> calls{{"tessera, forward", 1, [&] { x.forward(); }},
                           {"unfused, forward", 2, [&] { plain.forward(f32(other.o)); }},
                           {"tessera, backward", 2.5, [&] { x.backward(); }},
                           {"unfused, backward", 4, [&] {
                              plain.backward(f32(other.d_o), f32(other.o), f32(other.dq), f32(other.dk), f32(other.dv));
                            }}};
  {
    Progress progress(static_cast<double>(rounds + 1) * (1 + 2 + 2.5 + 4));
    measure_in_turn(calls, progress);
  }
  const Figures ours{median(calls[0].times), median(calls[2].times), fused_bytes(x, false), fused_bytes(x, true)};
  const Figures theirs{median(calls[1].times), median(calls[3].times), plain.forward_bytes(), plain.backward_bytes()};
  print_comparison(ours, theirs);
  const double apart = std::max(
      {difference(x.o, other.o), difference(x.dq, other.dq), difference(x.dk, other.dk), difference(x.dv, other.dv)});
  std::printf(
      "\nMedians of %zu runs in turn; the results differ by %.1e at most. Extra memory is what is allocated beyond Q, "
      "K,\n"
      "V, O and their gradients. Unfused attention computes all of S, masks it and keeps P for the backward pass; it "
      "is\n"
      "blocked for the caches, uses %s and one thread per head.\n",
      rounds, apart, name_of(best_isa()));
  json["tessera"] = ours.json();
  json["unfused"] = theirs.json();
  json["largest_difference"] = apart;
}

Json realistic_problem(const Arguments& a) {
  const std::vector<std::int64_t> shape{1, tokens, heads, dim};
  const int threads = a.execution.threads();
  std::printf("\n%lld heads, %lld tokens, D=%lld, causal, f32, %d threads:\n", static_cast<long long>(heads),
              static_cast<long long>(tokens), static_cast<long long>(dim), threads);
  std::fflush(stdout);
  const auto random = [&](std::uint64_t seed) { return random_normal(Type::f32, shape, seed); };
  Attention x(random(1), random(2), random(3), random(4)), other(random(1), random(2), random(3), random(4));
  x.options.causal = true;
  x.execution = a.execution.execution();
  const UnfusedProblem problem{
      heads, tokens, dim, true, threads, x.q.data<float>(), x.k.data<float>(), x.v.data<float>()};
  Json json{{"heads", heads}, {"tokens", tokens}, {"dim", dim}, {"causal", true}, {"threads", threads}};
  const std::size_t needed = Unfused::total_bytes(problem);
  if (needed < available_memory()) {
    compare(x, other, problem, json);
    return json;
  }
  const double forward = median_seconds([&] { x.forward(); }, rounds, 0);
  const double backward = median_seconds([&] { x.backward(); }, rounds, 0);
  std::printf("  forward %s, backward %s; unfused attention needs %s, more than is free here\n",
              time_text(forward).c_str(), time_text(backward).c_str(), bytes_text(needed).c_str());
  json["tessera"] = Figures{forward, backward, fused_bytes(x, false), fused_bytes(x, true)}.json();
  return json;
}

// --- the realistic problem on a GPU ----------------------------------------------------------------------------------

// There is no unfused attention for GPUs here: the baseline is the simplest kernel, the last of the library's list.
Json realistic_problem_on_gpu(const Arguments& a) {
  const std::int64_t tokens = fitting_tokens(1, heads, dim, *a.gpu);
  const std::vector<std::int64_t> shape{1, tokens, heads, dim};
  const auto random = [&](std::uint64_t seed) { return random_normal(Type::f32, shape, seed); };
  const GpuAttention gpu(random(1), random(2), random(3), random(4), *a.gpu);
  const Options options{.causal = true};
  const char* chosen = a.execution.execution().kernel;
  const std::vector<std::string> kernels = gpu_kernels(Type::f32, *a.gpu);
  const std::string best = chosen ? chosen : kernels.front(), simplest = kernels.back();
  std::printf("\n%lld heads, %lld tokens, D=%lld, causal, f32:\n", static_cast<long long>(heads),
              static_cast<long long>(tokens), static_cast<long long>(dim));
  const Table table(
      {{"", 10, true}, {best, 12}, {"TFLOP/s", 9}, {simplest, 12}, {"speed-up", 9}, {"extra memory", 12}});
  std::fputs(table.heading().c_str(), stdout);
  Json json{{"heads", heads}, {"tokens", tokens}, {"dim", dim}, {"causal", true}, {"kernel", best}};
  const GpuTimer timer(*a.gpu);
  const int runs = a.gpu->type == DeviceType::cuda ? 20 : static_cast<int>(rounds);
  for (const bool backward : {false, true}) {
    const GpuPass ours(gpu, backward, options, best.c_str()), plain(gpu, backward, options, simplest.c_str());
    const double seconds = timer.median_seconds([&] { ours.enqueue(); }, runs);
    const double plain_seconds = timer.median_seconds([&] { plain.enqueue(); }, runs);
    const double operations = (backward ? 2.5 : 1) * 2.0 * static_cast<double>(heads * tokens * tokens * dim);
    const std::string line = table.row({backward ? "  backward" : "  forward", time_text(seconds),
                                        tflops_text(operations / seconds), time_text(plain_seconds),
                                        format("%.2fx", plain_seconds / seconds), bytes_text(ours.workspace_bytes())});
    std::fputs(line.c_str(), stdout);
    json["tessera"][backward ? "backward_seconds" : "forward_seconds"] = seconds;
    json["tessera"][backward ? "backward_bytes" : "forward_bytes"] = ours.workspace_bytes();
    json[simplest][backward ? "backward_seconds" : "forward_seconds"] = plain_seconds;
  }
  return json;
}

int demo(Arguments& a) {
  require_place(a.json);
  choose_device(a);
  Json json;
  json["machine"] = machine();
  json["device"] = a.gpu ? gpu_name(*a.gpu) : "cpu";
  json["small"] = small_problem(a);
  std::fflush(stdout);
  if (!a.small) json["realistic"] = a.gpu ? realistic_problem_on_gpu(a) : realistic_problem(a);
  save_json(a.json, json);
  return 0;
}

}  // namespace

Action add_demo(CLI::App& program) {
  auto arguments = std::make_shared<Arguments>();
  CLI::App& command = add_command(
      program, "demo", "See it work: a small problem in numbers, a realistic one in speed",
      "The small problem: 128 tokens, 32 dims, corners of every tensor, latency, error against float64.\n"
      "The realistic one: 8 heads, 4096 tokens, D=64, causal, beside plain attention that keeps N x N matrices.\n"
      "Both run on CUDA's GPU if there is one, unless --device cpu or a CPU's kernel is asked for; with --device "
      "vulkan\n"
      "on the first Vulkan device, and the realistic one with fewer tokens if that is slow.\n\n"
      "Examples:\n"
      "  tessera demo\n"
      "  tessera demo --small --kernel sse4 --json demo.json\n"
      "  tessera demo --device vulkan");
  add_flag(command, "--small", "Only the small problem", arguments->small);
  add_json_flag(command, arguments->json);
  arguments->execution.add_to(command);
  return [arguments] { return demo(*arguments); };
}

}  // namespace tessera::cli
