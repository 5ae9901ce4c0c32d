// SPDX-License-Identifier: Apache-2.0
// Implements cli/flags.hpp over CLI11.
// See flags.hpp for the reason why it exists.
#include "cli/flags.hpp"

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdlib>
#include <stdexcept>
#include <type_traits>

#include "cli/report.hpp"

namespace tessera::cli {
namespace {

// Shows a flag's value by its name alone, and no double blank lines.
class PlainHelp : public CLI::Formatter {
 public:
  std::string make_option_opts(const CLI::Option* option) const override {
    std::string text;
    if (option->get_type_size() != 0) text += " " + option->get_type_name();
    if (option->get_required()) text += " (required)";
    return text;
  }

  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override {
    std::string text = CLI::Formatter::make_help(app, std::move(name), mode);
    for (std::size_t at; (at = text.find("\n\n\n")) != std::string::npos;) text.erase(at, 1);
    return text;
  }
};

// The values that a check allows are in the help text already, in words.
CLI::Validator silent(CLI::Validator validator) { return validator.description(""); }

CLI::Validator within(double least, double most) {
  const auto sentence = [=](const std::string& text) {
    double value = 0;
    if (CLI::detail::lexical_cast(text, value) && value >= least && value <= most) return std::string();
    if (most >= 1e300) return format("%s is not a number of at least %.15g", text.c_str(), least);
    return format("%s is not a number from %.15g to %.15g", text.c_str(), least, most);
  };
  return CLI::Validator(sentence, "");
}

CLI::Option* styled(CLI::Option* option, const FlagStyle& style) {
  option->type_name(style.value)->group(style.group)->required(style.required);
  if (!style.choices.empty()) option->check(silent(CLI::IsMember(style.choices)));
  if (style.least > -1e300 || style.most < 1e300) option->check(within(style.least, style.most));
  return option;
}

template <class T>
bool fits(const std::string& text) {
  if (text.empty()) return false;
  if constexpr (std::is_floating_point_v<T>) return true;  // whatever CLI11 can read
  errno = 0;
  if (std::is_unsigned_v<T> && text.front() != '-') return std::strtoull(text.c_str(), nullptr, 0), errno == 0;
  const long long value = std::strtoll(text.c_str(), nullptr, 0);
  return errno == 0 && (std::is_unsigned_v<T> || static_cast<long long>(static_cast<T>(value)) == value);
}

// CLI11 takes an empty text for 0, and a number beyond 64 bits for the largest: both are refused here.
template <class T>
CLI::Validator number() {
  const auto sentence = [](const std::string& text) {
    if (fits<T>(text)) return std::string();
    if (std::is_floating_point_v<T>) return format("'%s' is not a number", text.c_str());
    return format("'%s' is not an integer of %zu bits", text.c_str(), 8 * sizeof(T));
  };
  return CLI::Validator(sentence, "");
}

template <class T>
void add_value(CLI::App& command, const char* flag, const std::string& help, T& value, const FlagStyle& style) {
  CLI::Option* option = styled(command.add_option(flag, value, help), style);
  if constexpr (std::is_arithmetic_v<T>) option->check(number<T>());
}

template <class T>
void add_list(CLI::App& command, const char* flag, const std::string& help, T& values, const FlagStyle& style) {
  CLI::Option* option = command.add_option(flag, values, help)->delimiter(',');
  if (style.count > 0) option->expected(style.count);
  styled(option, style);
  if constexpr (std::is_arithmetic_v<typename T::value_type>) option->check(number<typename T::value_type>());
}

}  // namespace

void use_plain_help(CLI::App& program) { program.formatter(std::make_shared<PlainHelp>()); }

CLI::App& add_command(CLI::App& program, const char* name, const char* what_it_does, const char* examples) {
  CLI::App* command = program.add_subcommand(name, what_it_does);
  command->footer(examples);
  return *command;
}

CLI::App& add_command_group(CLI::App& program, const char* name, const char* what_it_does, const char* examples) {
  CLI::App& group = add_command(program, name, what_it_does, examples);
  group.require_subcommand(1);
  return group;
}

bool is_chosen(const CLI::App& command) { return command.parsed(); }
// Not by CLI11's search for a name: it is noexcept and copies names, so a process would end there without memory.
bool is_given(const CLI::App& command, const char* flag) {
  for (const CLI::Option* option : command.get_options())
    for (const std::string& name : option->get_lnames())
      if (flag + 2 == name) return option->count() > 0;
  throw std::logic_error(std::string("there is no flag ") + flag);
}

void add_flag(CLI::App& command, const char* flag, const std::string& help, bool& given, const FlagStyle& style) {
  command.add_flag(flag, given, help)->group(style.group);
}
void add_flag(CLI::App& command, const char* flag, const std::string& help, int& value, const FlagStyle& style) {
  add_value(command, flag, help, value, style);
}
void add_flag(CLI::App& command, const char* flag, const std::string& help, std::int64_t& value,
              const FlagStyle& style) {
  add_value(command, flag, help, value, style);
}
void add_flag(CLI::App& command, const char* flag, const std::string& help, std::uint64_t& value,
              const FlagStyle& style) {
  add_value(command, flag, help, value, style);
}
void add_flag(CLI::App& command, const char* flag, const std::string& help, double& value, const FlagStyle& style) {
  add_value(command, flag, help, value, style);
}
void add_flag(CLI::App& command, const char* flag, const std::string& help, std::string& value,
              const FlagStyle& style) {
  add_value(command, flag, help, value, style);
}
void add_flag(CLI::App& command, const char* flag, const std::string& help, std::vector<std::int64_t>& values,
              const FlagStyle& style) {
  add_list(command, flag, help, values, style);
}
void add_flag(CLI::App& command, const char* flag, const std::string& help, std::vector<std::string>& values,
              const FlagStyle& style) {
  add_list(command, flag, help, values, style);
}

}  // namespace tessera::cli
