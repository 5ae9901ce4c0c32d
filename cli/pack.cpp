// SPDX-License-Identifier: Apache-2.0
// `tessera pack`: compiles GPU kernels ahead of time, without a GPU, into a file that the library reads at run time.
// Implements docs/architecture.md, "Compiling kernels".
#include <cstdio>
#include <memory>
#include <ostream>

#include "api/units.hpp"
#include "cli/command.hpp"
#include "cli/failure.hpp"
#include "cli/files.hpp"
#include "cli/flags.hpp"
#include "cli/options.hpp"
#include "cli/progress.hpp"
#include "cli/report.hpp"
#include "core/parallel.hpp"

namespace tessera::cli {
namespace {

struct Arguments {
  std::string architecture = api::common_architecture, out, json;
  std::vector<std::string> types{"f32", "f16", "bf16"}, dims{"64", "128"};
  int jobs = 0;
  bool list = false;
};

// "64" or "192/128".
api::HeadDims dims_named(const std::string& name) {
  long long D = 0, Dv = 0;
  int end = 0;
  if (std::sscanf(name.c_str(), "%lld/%lld%n", &D, &Dv, &end) != 2) {
    std::sscanf(name.c_str(), "%lld%n", &D, &end);
    Dv = D;
  }
  if (static_cast<std::size_t>(end) != name.size() || D < 1 || D > 576 || Dv < 1 || Dv > 512)
    throw Failure("--dims: is '" + name + "'; must be D or D/DV, with D from 1 to 576 and DV (D if missing) to 512.");
  return {D, Dv};
}

std::vector<cuda::NamedUnit> units_of(const Arguments& a) {
  std::vector<Type> types;
  std::vector<api::HeadDims> dims;
  for (const std::string& name : a.types) types.push_back(type_named(name));
  for (const std::string& name : a.dims) dims.push_back(dims_named(name));
  return api::plain_units(cuda::target_named(a.architecture), types, dims);
}

void list(const Arguments& a, const std::vector<cuda::NamedUnit>& units) {
  const Table table({{"kernel", 26, true}, {"problem", 20, true}, {"GPU", 8, true}});
  std::printf("%s", table.heading().c_str());
  for (const cuda::NamedUnit& u : units)
    std::printf("%s", table.row({u.kernel, u.variant, u.unit.architecture}).c_str());
  if (a.json.empty()) return;

  Json json = Json::array();
  for (const cuda::NamedUnit& u : units)
    json.push_back({{"kernel", u.kernel}, {"problem", u.variant}, {"architecture", u.unit.architecture}});
  save_json(a.json, json);
}

void compile(const Arguments& a, const std::vector<cuda::NamedUnit>& units) {
  require_distinct({{"--out", a.out}, {"--json", a.json}}, {});
  Json json = Json::array();
  const Table table({{"kernel", 26, true}, {"problem", 20, true}, {"registers", 9}, {"size", 10}, {"time", 10}});
  std::printf("%s", table.heading().c_str());
  Progress progress(static_cast<double>(units.size()));
  progress.step("compiling");
  const auto on_compiled = [&](const cuda::NamedUnit& u, const cuda::Compiled& c) {
    progress.hide();
    const std::string registers = format("%d", c.resources.registers);
    std::printf("%s",
                table.row({u.kernel, u.variant, registers, bytes_text(c.cubin.size()), time_text(c.seconds)}).c_str());
    std::fflush(stdout);
    progress.advance(1);
    json.push_back({{"kernel", u.kernel},
                    {"problem", u.variant},
                    {"architecture", u.unit.architecture},
                    {"registers", c.resources.registers},
                    {"bytes", c.cubin.size()},
                    {"seconds", c.seconds}});
  };
  const cuda::Pack pack = cuda::make_pack(units, {}, resolve_threads(a.jobs), on_compiled);
  Files files;
  files.add(a.out, [&](std::ostream& out) { out << cuda::write_pack(pack); });
  if (!a.json.empty()) files.add(a.json, [&](std::ostream& out) { out << json.text(); });
  files.commit([&] {
    progress.hide();
    std::printf("%zu kernels are in %s. The library reads it when TESSERA_PACK names it.\n", pack.size(),
                a.out.c_str());
    require_stdout();
  });
}

int pack(const Arguments& a) {
  require_place(a.json);
  require_place(a.out);
  const std::vector<cuda::NamedUnit> units = units_of(a);
  if (a.list) list(a, units);
  if (!a.list && a.out.empty()) throw Failure("--out: is missing; name the file to write, or ask for --list.");
  if (!a.list) compile(a, units);
  return 0;
}

}  // namespace

Action add_pack(CLI::App& program) {
  auto arguments = std::make_shared<Arguments>();
  Arguments& a = *arguments;
  CLI::App& command =
      add_command(program, "pack", "Compile GPU kernels ahead of time, without a GPU",
                  "Forward and backward kernels of problems without options; causal or not is the same.\n"
                  "Examples:\n"
                  "  tessera pack --arch sm_80 --out a100.pack\n"
                  "  tessera pack --types bf16 --dims 96,192/128 --out hopper.pack\n"
                  "  TESSERA_PACK=hopper.pack ./my_program");
  add_flag(command, "--arch", "The GPU's architecture: sm_75, sm_80, sm_86, ..., sm_90a (the default)", a.architecture,
           {.value = "NAME"});
  add_flag(command, "--types", "f32, f16, bf16 (default: all three)", a.types,
           {.value = "LIST", .choices = {"f32", "f16", "bf16"}});
  add_flag(command, "--dims", "Head dimensions: D, or D/DV where V's differs (default: 64,128)", a.dims,
           {.value = "LIST"});
  add_flag(command, "--out", "File to write", a.out, {.value = "FILE"});
  add_flag(command, "--jobs", "Kernels compiled at once (default: 0, one per processor)", a.jobs,
           {.value = "N", .least = 0, .most = 4096});
  add_flag(command, "--list", "Show what would be compiled, and compile nothing", a.list);
  add_json_flag(command, a.json);
  return [arguments] { return pack(*arguments); };
}

}  // namespace tessera::cli
