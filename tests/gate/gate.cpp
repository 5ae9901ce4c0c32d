// SPDX-License-Identifier: Apache-2.0
// Compiling and judging units; see gate.hpp.
#include "tests/gate/gate.hpp"

#include <algorithm>
#include <cstdio>
#include <mutex>

#include "core/failure.hpp"
#include "core/parallel.hpp"

namespace tessera::gate {
namespace {

constexpr double most_times = 20;  // the reference's time: users wait for it in a first call
constexpr int tries = 3;
constexpr std::size_t slowest_shown = 5;

void print_row(const Judged& j) {
  const cuda::NamedUnit& u = j.unit->named;
  const std::string verdict = !j.fault.empty() ? text("FAULT: ", j.fault.substr(0, j.fault.find('\n')))
                              : j.compiled.resources.spill_bytes > 0 ? "ok, spills (control group)"
                                                                     : "ok";
  std::printf("%-26s %-44s %-7s %4d %5.2f %5.1f  %s\n", u.kernel.c_str(), u.variant.c_str(),
              u.unit.architecture.c_str(), j.compiled.resources.registers, j.compiled.seconds, j.times,
              verdict.c_str());
}

void print_heading(const char* title) {
  std::printf("%s\n%-26s %-44s %-7s %4s %5s %5s  %s\n", title, "kernel", "problem", "GPU", "regs", "s", "times",
              "verdict");
}

}  // namespace

double reference_seconds() {
  static const cuda::Unit reference{R"(
extern "C" __global__ __launch_bounds__(256) void kernel(const float* a, const float* b, float* c) {
  float sums[8][8] = {};
#pragma unroll
  for (int k = 0; k < 8; ++k)
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[i][j] = exp2f(sums[i][j]) + a[k * 8 + i] * b[k * 8 + j];
  for (int i = 0; i < 8; ++i)
    for (int j = 0; j < 8; ++j) c[threadIdx.x * 64 + i * 8 + j] = sums[i][j];
})",
                                    "sm_80"};
  return cuda::compile(reference).seconds;
}

std::string fault_of(const GateUnit& unit, const cuda::Compiled& compiled, double times) {
  const cuda::Resources& r = compiled.resources;
  if (!unit.may_spill && r.spill_bytes > 0) return text("spills ", r.spill_bytes, " bytes");
  if (!unit.may_spill && r.stack_bytes > 0) return text("keeps ", r.stack_bytes, " bytes in local memory");
  if (r.serialised_wgmma) return "its wgmma instructions wait for each other (ptxas C7510 to C7515)";
  if (times > most_times)
    return text("takes ", times, " times as long to compile as the reference unit; at most ", most_times, " times");
  return "";
}

Judged judge(const GateUnit& unit, double reference) {
  Judged out{&unit, {}, 0, ""};
  try {
    out.compiled = cuda::compile(unit.named.unit);
    out.times = out.compiled.seconds / reference;
    // Both one after the other: a machine that was busy meanwhile, or is now, shows in both.
    for (int n = 1; n < tries && out.times > most_times; ++n) {
      const double now = reference_seconds();
      out.times = std::min(out.times, cuda::compile(unit.named.unit).seconds / now);
    }
    out.fault = fault_of(unit, out.compiled, out.times);
  } catch (const Failure& failure) {
    out.fault = failure.what();
  }
  return out;
}

std::size_t run_gate(const std::vector<GateUnit>& units, int threads) {
  std::vector<Judged> all(units.size());
  std::mutex mutex;
  double reference = reference_seconds();
  for (int n = 1; n < tries; ++n) reference = std::min(reference, reference_seconds());
  std::printf("Compile times are told in seconds of processor time, and in multiples of a reference unit's %.2f s.\n",
              reference);
  print_heading("");
  parallel_for(static_cast<std::int64_t>(units.size()), threads, [&](std::int64_t index, int) {
    const auto i = static_cast<std::size_t>(index);
    all[i] = judge(units[i], reference);
    const std::lock_guard lock(mutex);
    print_row(all[i]);
    all[i].compiled.cubin.clear(), all[i].compiled.log.clear();
    std::fflush(stdout);
  });

  std::vector<const Judged*> by_time, faulty;
  double seconds = 0;
  for (const Judged& j : all) {
    by_time.push_back(&j), seconds += j.compiled.seconds;
    if (!j.fault.empty()) faulty.push_back(&j);
  }
  std::sort(by_time.begin(), by_time.end(),
            [](const Judged* a, const Judged* b) { return a->compiled.seconds > b->compiled.seconds; });
  by_time.resize(std::min(by_time.size(), slowest_shown));
  print_heading("\nslowest");
  for (const Judged* j : by_time) print_row(*j);
  if (!faulty.empty()) print_heading("\nfaults");
  for (const Judged* j : faulty) {
    print_row(*j);
    std::printf("%s%s\n", j->unit->named.unit.text.c_str(),
                j->fault.find('\n') == std::string::npos ? "" : j->fault.c_str());
  }
  std::printf("\n%zu units compiled in %.1f s of processor time, %zu faults\n", all.size(), seconds, faulty.size());
  return faulty.size();
}

}  // namespace tessera::gate
