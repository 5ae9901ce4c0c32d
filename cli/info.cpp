// SPDX-License-Identifier: Apache-2.0
// `tessera info`: what the library says of this machine, and which library it is.
// Implements the command-line part of docs/architecture.md.
#include <cstdio>
#include <memory>
#include <sstream>

#include "cli/command.hpp"
#include "cli/flags.hpp"
#include "cli/options.hpp"
#include "cli/report.hpp"
#include "tessera/tessera.hpp"

namespace tessera::cli {
namespace {

int info(const std::string& json_path) {
  const std::string text = tessera::info();
  std::printf("version    %s, built with %s\n%s", version().c_str(), compiler().c_str(), text.c_str());

  if (json_path.empty()) return 0;

  // The library's lines are a name, spaces, and the fact.
  Json json = machine();
  std::istringstream lines(text);
  lines.exceptions(std::ios::badbit);  // out of memory is not the end of the text
  for (std::string line; std::getline(lines, line);) {
    const std::size_t end = line.find(' '), begin = line.find_first_not_of(' ', end);
    if (begin != std::string::npos) json["library"][line.substr(0, end)] = line.substr(begin);
  }
  save_json(json_path, json);
  return 0;
}

}  // namespace

Action add_info(CLI::App& program) {
  auto json = std::make_shared<std::string>();
  CLI::App& command = add_command(program, "info", "This machine: CPU, instruction sets, threads, kernels, GPU",
                                  "Examples:\n  tessera info\n  tessera info --json machine.json");
  add_json_flag(command, *json);
  return [json] { return info(*json); };
}

}  // namespace tessera::cli
