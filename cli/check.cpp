// SPDX-License-Identifier: Apache-2.0
// `tessera check`: the case tables and random configurations against float64.
// A thin layer over cases/suite.hpp, which the tests use too; the rule is in docs/numerics.md.
#include <cstdint>
#include <cstdio>
#include <memory>

#include "cases/random.hpp"
#include "cases/suite.hpp"
#include "cli/command.hpp"
#include "cli/failure.hpp"
#include "cli/files.hpp"
#include "cli/flags.hpp"
#include "cli/gpu.hpp"
#include "cli/options.hpp"
#include "cli/progress.hpp"
#include "cli/report.hpp"

namespace tessera::cli {
namespace {

struct Arguments {
  std::string suite = "all", one_case, json;
  std::uint64_t seed = 1;
  std::uint64_t count = 500;
  bool list = false, nondeterministic = false, forward = false;
  ExecutionFlags execution;
};

std::vector<cases::Case> named(const Arguments& a) {
  if (!a.one_case.empty()) return {cases::find_case(a.one_case)};
  if (a.suite == "random") return cases::random_cases(a.seed, a.count);
  if (a.suite == "random_small") return cases::random_small_cases(a.seed, a.count);
  if (a.suite == "random_caches") return cases::random_cache_cases(a.seed, a.count);
  return cases::suite(a.suite);
}

std::vector<cases::Case> chosen(const Arguments& a) {
  std::vector<cases::Case> all = named(a);
  for (cases::Case& one : all) {
    one.options.deterministic = !a.nondeterministic;
    if (a.forward) one.backward = false;
  }
  return all;
}

Json to_json(const cases::CaseReport& report) {
  Json outputs = Json::array();
  for (const cases::OutputReport& o : report.outputs)
    outputs.push_back({{"name", o.name},
                       {"type", cases::name_of(o.type)},
                       {"error", o.error},
                       {"allowed", o.allowed},
                       {"underflow", o.underflow},
                       {"model_error", o.model_error},
                       {"norm", o.norm},
                       {"ok", o.ok}});
  return {{"name", report.name},         {"case", report.text},
          {"kernel", report.kernel},     {"ok", report.ok},
          {"skipped", report.skipped},   {"seconds", report.seconds},
          {"messages", report.messages}, {"repeat", report.reproduce},
          {"outputs", outputs}};
}

Json to_json(const cases::SuiteReport& report, const Arguments& a) {
  Json json;
  json["machine"] = machine();
  json["suite"] = a.one_case.empty() ? a.suite : "case " + a.one_case;
  if (a.suite.starts_with("random")) json["seed"] = a.seed;
  json["passed"] = report.passed;
  json["failed"] = report.failed;
  json["skipped"] = report.skipped;
  json["underflowed"] = cases::underflowed(report);
  json["cases"] = Json::array();
  for (const cases::CaseReport& one : report.cases) json["cases"].push_back(to_json(one));
  return json;
}

void plan_one(const Execution& execution, Type type) {
  const Device device = execution.device.type == DeviceType::any ? Device{} : execution.device;
  const Tensor one(nullptr, type, {1, 1, 1, 64}, device);
  Inputs inputs;
  inputs.q = inputs.k = inputs.v = one;
  Plan::forward(inputs, {.o = one, .lse = {}}, {}, execution);
}

// A kernel or device that does not exist is one error, not one per case: planning a problem that every kernel takes
// makes the library say what is wrong. Devices may have matrices of one type of 16 bits and not of the other.
void require_kernel(const Execution& execution) {
  try {
    plan_one(execution, Type::bf16);
  } catch (const Error&) {
    plan_one(execution, Type::f16);
  }
}

// What would have no effect is refused.
void require_use(const CLI::App& command, const Arguments& a) {
  if (!a.one_case.empty() && is_given(command, "--suite"))
    throw Failure("--suite: is given beside --case, which names one case of any table; give one of them.");
  if (a.list && is_given(command, "--json"))
    throw Failure("--json: is given beside --list, which runs nothing that it could hold; give one of them.");
  if (a.one_case.empty() && a.suite.starts_with("random")) return;
  for (const char* flag : {"--seed", "--count"})
    if (is_given(command, flag))
      throw Failure(std::string(flag) + ": is for --suite random, random_small and random_caches alone.");
}

int check(const CLI::App& command, const Arguments& a) {
  require_use(command, a);
  const std::vector<cases::Case> all = chosen(a);
  if (a.list) {
    for (const cases::Case& one : all) std::printf("%-32s %s\n", one.name.c_str(), cases::describe(one).c_str());
    return 0;
  }
  require_place(a.json);
  require_device("check", a.execution.device_name());
  require_kernel(a.execution.execution());
  cases::SuiteReport report;
  {
    Progress progress(static_cast<double>(all.size()));
    report = cases::run_suite(
        all, a.execution.execution(), [&](const cases::CaseReport& one, std::size_t done, std::size_t total) {
          progress.step("case " + std::to_string(done) + " of " + std::to_string(total) + "  " + one.name);
          progress.advance(1);
          if (one.ok) return;
          progress.hide();
          std::printf("%s\n", cases::to_text(one).c_str());
        });
  }
  std::printf("%s\n%zu passed, %zu failed, %zu skipped\n", cases::worst_table(report).c_str(), report.passed,
              report.failed, report.skipped);
  if (report.passed + report.failed == 0 && report.skipped > 0)
    std::printf("first reason: %s\n",
                report.cases.front().messages.empty() ? "?" : report.cases.front().messages.front().c_str());
  save_json(a.json, to_json(report, a));
  // A check that ran no case is a failure: it has shown nothing.
  return report.ok() && report.passed > 0 ? 0 : 1;
}

}  // namespace

Action add_check(CLI::App& program) {
  auto arguments = std::make_shared<Arguments>();
  Arguments& a = *arguments;
  CLI::App& command = add_command(
      program, "check", "Compare every output with float64, case by case",
      "The table shows the worst error as a share of the allowed one, for each output and type; above 1 is a failure.\n"
      "A failing case prints the command that repeats it. The exit status is 1 if anything failed.\n\n"
      "Examples:\n"
      "  tessera check --suite features --kernel avx2\n"
      "  tessera check --suite random --seed 42 --count 1000 --json report.json");
  add_flag(command, "--suite",
           "regular, features, corner, or all of these three (the default); caches; random, random_small (for slow "
           "devices), random_caches",
           a.suite,
           {.value = "NAME",
            .choices = {"regular", "features", "corner", "all", "caches", "random", "random_small", "random_caches"}});
  add_flag(command, "--case", "Only this case of any table", a.one_case, {.value = "NAME"});
  add_flag(command, "--seed", "random suites: the first case's seed (default: 1)", a.seed, {.value = "N"});
  add_flag(command, "--count", "random suites: number of cases (default: 500)", a.count,
           {.value = "N", .least = 1, .most = 1e9});
  add_flag(command, "--nondeterministic", "Allow kernels whose bits may vary between runs", a.nondeterministic);
  add_flag(command, "--forward", "Only the forward pass", a.forward);
  add_flag(command, "--list", "Print the cases and run nothing", a.list);
  add_json_flag(command, a.json);
  a.execution.add_to(command);
  return [&command, arguments] { return check(command, *arguments); };
}

}  // namespace tessera::cli
