// SPDX-License-Identifier: Apache-2.0
// `tessera dist measure`: times of the calls that a rank makes, of several sizes, on this CPU or GPU: forward with a
// state that is carried, backward added to sums in f32. Its file is what `simulate --times` takes.
// Implements docs/scale_out.md, "Simulator".
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "cli/array.hpp"
#include "cli/dist.hpp"
#include "cli/failure.hpp"
#include "cli/files.hpp"
#include "cli/gpu.hpp"
#include "cli/placement.hpp"
#include "cli/timing.hpp"
#include "cli/turns.hpp"

namespace tessera::cli {
namespace {

constexpr Pace cpu_pace{.rounds = 3, .warm = 0, .timed = 0};  // one call in each round, after one that does not count

// Both calls of one size: as many queries as keys, which all see each other, bf16.
class Calls {
 public:
  Calls(const DistMeasure& a, std::int64_t rows) : place(a.device), rows(rows), D(a.dim), heads(a.heads) {
    const std::vector<std::int64_t> of_q{1, rows, a.heads, D}, of_k{1, rows, a.kv_heads, D}, numbers{1, a.heads, rows};
    q = random_normal(Type::bf16, of_q, 1), d_o = random_normal(Type::bf16, of_q, 4);
    k = random_normal(Type::bf16, of_k, 2), v = random_normal(Type::bf16, of_k, 3);
    o = Array(Type::bf16, of_q), lse = Array(Type::f32, numbers);
    state_o = Array(Type::f32, of_q), state_m = Array(Type::f32, numbers), state_l = Array(Type::f64, numbers);
    dq = Array(Type::f32, of_q), dk = Array(Type::f32, of_k), dv = Array(Type::f32, of_k);
    for (const Array* array : {&q, &k, &v, &d_o, &o, &lse, &state_o, &state_m, &state_l, &dq, &dk, &dv})
      place.copy_in(*array);
    Execution execution;
    execution.device = a.device;
    const Plan plain = Plan::forward(inputs(false), results(), {}, execution);
    const Plan first = Plan::forward(inputs(false), state(), {}, execution);
    next = std::make_unique<const Plan>(Plan::forward(inputs(true), state(), {}, execution));
    backward = std::make_unique<const Plan>(Plan::backward(inputs(false), saved(), gradients(), sums, execution));
    const std::size_t bytes =
        std::max({plain.workspace_size(), first.workspace_size(), next->workspace_size(), backward->workspace_size()});
    run_on = place.with_workspace(execution, bytes);
    plain.run(inputs(false), results(), {}, run_on);  // O and LSE for the backward pass
    first.run(inputs(false), state(), {}, run_on);    // a state that goes on
    place.wait();
  }

  void run(bool is_backward) const {
    if (is_backward) return backward->run(inputs(false), saved(), gradients(), sums, run_on);
    next->run(inputs(true), state(), {}, run_on);
  }
  // As the simulator counts them.
  double flops(bool is_backward) const {
    return 2.0 * double(heads) * double(rows) * double(rows) * double(is_backward ? 5 * D : 2 * D);
  }
  std::string kernel(bool is_backward) const { return is_backward ? backward->kernel() : next->kernel(); }

 private:
  State carried() const { return {place.view(state_o), place.view(state_m), place.view(state_l)}; }
  Inputs inputs(bool continued) const {
    Inputs in;
    in.q = place.view(q), in.k = place.view(k), in.v = place.view(v);
    if (continued) in.state = carried();
    return in;
  }
  Outputs results() const {
    Outputs out;
    out.o = place.view(o), out.lse = place.view(lse);
    return out;
  }
  Outputs state() const {
    Outputs out;
    out.state = carried();
    return out;
  }
  Saved saved() const { return {place.view(o), place.view(lse), place.view(d_o), {}}; }
  Gradients gradients() const { return {place.view(dq), place.view(dk), place.view(dv), {}, {}}; }

  Placement place;
  std::int64_t rows, D, heads;
  Array q, k, v, d_o, o, lse, state_o, state_m, state_l, dq, dk, dv;
  const Options sums{.accumulate = true};
  std::unique_ptr<const Plan> next, backward;
  Execution run_on;
};

// One pass of one size.
struct Measured {
  std::shared_ptr<const Calls> calls;
  bool backward;
  double flops, seconds = 0;
};

// Medians over rounds in which all take turns.
void measure(std::vector<Measured>& all, Device device) {
  const bool on_gpu = device.type == DeviceType::cuda;
  const std::unique_ptr<const GpuTimer> timer = on_gpu ? std::make_unique<const GpuTimer>() : nullptr;
  const auto timed = [&](const Measured& one, int calls) {
    const auto work = [&] {
      for (int n = 0; n < calls; ++n) one.calls->run(one.backward);
    };
    return (on_gpu ? timer->seconds(work) : seconds_of(work)) / calls;
  };
  for (Measured& one : all) one.seconds = timed(one, 1);
  const auto burst = [&](std::size_t n, double budget) {
    return all[n].seconds = timed(all[n], std::max(1, static_cast<int>(std::ceil(budget / all[n].seconds))));
  };
  const std::vector<std::vector<double>> times = take_turns(all.size(), on_gpu ? gpu_pace : cpu_pace, burst);
  for (std::size_t n = 0; n < all.size(); ++n) all[n].seconds = median(times[n]);
}

}  // namespace

int dist_measure(const DistMeasure& a, Json& json) {
  require_device("dist measure", a.device.type == DeviceType::cuda ? "cuda" : "cpu");
  std::vector<std::int64_t> sizes = a.rows;
  if (sizes.empty()) sizes = {256, 1024};
  if (a.rows.empty() && a.device.type == DeviceType::cuda) sizes = {1024, 2048, 4096, 8192, 16384};
  std::ranges::sort(sizes);
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  std::vector<Measured> all;
  for (const std::int64_t rows : sizes) {
    const auto calls = std::make_shared<const Calls>(a, rows);
    for (const bool backward : {false, true}) all.push_back({calls, backward, calls->flops(backward)});
  }
  measure(all, a.device);
  // Where launching is all that takes time, noise could make a larger call the shorter one, which --times refuses.
  for (std::size_t n = all.size(); n-- > 2;) all[n - 2].seconds = std::min(all[n - 2].seconds, all[n].seconds);

  const std::string where =
      a.device.type == DeviceType::cuda ? gpu_name() : format("CPU, %d threads", usable_threads());
  std::string text =
      format("# %s, %lld query and %lld key heads of %lld, bf16: pass, GFLOP, microseconds\n", where.c_str(),
             static_cast<long long>(a.heads), static_cast<long long>(a.kv_heads), static_cast<long long>(a.dim));
  for (const Measured& one : all) {
    const std::string line =
        format("%-8s %12.6g %12.6g", one.backward ? "backward" : "forward", one.flops * 1e-9, one.seconds * 1e6);
    const std::string kernel = one.calls->kernel(one.backward);
    std::printf("%s   %-16s %8s TFLOP/s\n", line.c_str(), kernel.c_str(), tflops_text(one.flops / one.seconds).c_str());
    text += line + '\n';
    json.push_back({{"pass", one.backward ? "backward" : "forward"},
                    {"kernel", kernel},
                    {"gflop", one.flops * 1e-9},
                    {"us", one.seconds * 1e6}});
  }
  if (a.out.empty()) return 0;
  Files files;
  files.add(a.out, [&](std::ostream& out) { out << text; });
  files.commit();
  return 0;
}

}  // namespace tessera::cli
