// SPDX-License-Identifier: Apache-2.0
// Declares commands and their flags without CLI11's headers, which take seconds to compile: only two files include
// them. Included by the commands and by cli/options.cpp. Those two are cli/flags.cpp and cli/main.cpp.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace tessera::cli {

// Help in plainer words than the parser's own. For the program; its commands inherit it.
void use_plain_help(CLI::App& program);

CLI::App& add_command(CLI::App& program, const char* name, const char* what_it_does, const char* examples);
// One that has commands of its own, of which exactly one is to be given.
CLI::App& add_command_group(CLI::App& program, const char* name, const char* what_it_does, const char* examples);

// After parsing.
bool is_chosen(const CLI::App& command);
bool is_given(const CLI::App& command, const char* flag);

// How a flag looks in the help, and which values it takes. Only syntax is checked here; the library checks the rest.
struct FlagStyle {
  const char* value = "";               // name of the value in the help
  const char* group = "Options";        // heading in the help
  std::vector<std::string> choices{};   // the only values, unless empty
  double least = -1e300, most = 1e300;  // of numbers
  int count = 0;                        // lists: exactly so many values, unless 0
  bool required = false;
};

// Lists are separated by commas. The variable keeps its value when the flag is not given.
void add_flag(CLI::App& command, const char* flag, const std::string& help, bool& given, const FlagStyle& = {});
void add_flag(CLI::App& command, const char* flag, const std::string& help, int& value, const FlagStyle& = {});
void add_flag(CLI::App& command, const char* flag, const std::string& help, std::int64_t& value, const FlagStyle& = {});
void add_flag(CLI::App& command, const char* flag, const std::string& help, std::uint64_t& value,
              const FlagStyle& = {});
void add_flag(CLI::App& command, const char* flag, const std::string& help, double& value, const FlagStyle& = {});
void add_flag(CLI::App& command, const char* flag, const std::string& help, std::string& value, const FlagStyle& = {});
void add_flag(CLI::App& command, const char* flag, const std::string& help, std::vector<std::int64_t>& values,
              const FlagStyle& = {});
void add_flag(CLI::App& command, const char* flag, const std::string& help, std::vector<std::string>& values,
              const FlagStyle& = {});

}  // namespace tessera::cli
