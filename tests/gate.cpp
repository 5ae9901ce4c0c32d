// Compiling and judging units; see gate.hpp.
#include "tests/gate.hpp"

#include <algorithm>
#include <cstdio>
#include <mutex>

#include "core/failure.hpp"
#include "core/parallel.hpp"

namespace tessera::gate {
namespace {

constexpr double most_seconds = 3;  // of processor time: users wait for it in a first call
constexpr std::size_t slowest_shown = 5;

void print_row(const Judged& j) {
  const cuda::NamedUnit& u = j.unit->named;
  const std::string verdict = !j.fault.empty() ? text("FAULT: ", j.fault.substr(0, j.fault.find('\n')))
                              : j.compiled.resources.spill_bytes > 0 ? "ok, spills (control group)"
                                                                     : "ok";
  std::printf("%-26s %-44s %-7s %4d %5.2f  %s\n", u.kernel.c_str(), u.variant.c_str(), u.unit.architecture.c_str(),
              j.compiled.resources.registers, j.compiled.seconds, verdict.c_str());
}

void print_heading(const char* title) {
  std::printf("%s\n%-26s %-44s %-7s %4s %5s  %s\n", title, "kernel", "problem", "GPU", "regs", "s", "verdict");
}

}  // namespace

std::string fault_of(const GateUnit& unit, const cuda::Compiled& compiled) {
  const cuda::Resources& r = compiled.resources;
  if (!unit.may_spill && r.spill_bytes > 0) return text("spills ", r.spill_bytes, " bytes");
  if (!unit.may_spill && r.stack_bytes > 0) return text("keeps ", r.stack_bytes, " bytes in local memory");
  if (r.serialised_wgmma) return "its wgmma instructions wait for each other (ptxas C7510 to C7515)";
  if (compiled.seconds > most_seconds) return text("takes ", compiled.seconds, " s to compile; at most ", most_seconds);
  return "";
}

Judged judge(const GateUnit& unit) {
  Judged out{&unit, {}, ""};
  try {
    out.compiled = cuda::compile(unit.named.unit);
    if (out.compiled.seconds > most_seconds) {  // by the compiler, or by a busy machine? The second time tells.
      const double first = out.compiled.seconds;
      out.compiled = cuda::compile(unit.named.unit);
      out.compiled.seconds = std::min(first, out.compiled.seconds);
    }
    out.fault = fault_of(unit, out.compiled);
  } catch (const Failure& failure) {
    out.fault = failure.what();
  }
  return out;
}

std::size_t run_gate(const std::vector<GateUnit>& units, int threads) {
  std::vector<Judged> all(units.size());
  std::mutex mutex;
  print_heading("");
  parallel_for(static_cast<std::int64_t>(units.size()), threads, [&](std::int64_t index, int) {
    const auto i = static_cast<std::size_t>(index);
    all[i] = judge(units[i]);
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
