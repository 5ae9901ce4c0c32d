// Implements cli/flags.hpp over CLI11.
// See flags.hpp for the reason why it exists.
#include "cli/flags.hpp"

#include <CLI/CLI.hpp>

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
    return format("%s is not a number from %.0f to %.0f", text.c_str(), least, most);
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
void add_value(CLI::App& command, const char* flag, const std::string& help, T& value, const FlagStyle& style) {
  styled(command.add_option(flag, value, help), style);
}

template <class T>
void add_list(CLI::App& command, const char* flag, const std::string& help, T& values, const FlagStyle& style) {
  CLI::Option* option = command.add_option(flag, values, help)->delimiter(',');
  if (style.count > 0) option->expected(style.count);
  styled(option, style);
}

}  // namespace

void use_plain_help(CLI::App& program) { program.formatter(std::make_shared<PlainHelp>()); }

CLI::App& add_command(CLI::App& program, const char* name, const char* what_it_does, const char* examples) {
  CLI::App* command = program.add_subcommand(name, what_it_does);
  command->footer(examples);
  return *command;
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
