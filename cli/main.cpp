// SPDX-License-Identifier: Apache-2.0
// The `tessera` program: parses the command line, runs one command, turns every error into one sentence.
// Implements the command line described in docs/tour.md. Exit status: 0 fine, 1 failed, 2 wrong usage.
#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>
#include <utility>
#include <vector>

#include "cli/command.hpp"
#include "cli/flags.hpp"
#include "cli/report.hpp"

namespace {

using namespace tessera::cli;

int fail(const char* sentence, int status) {
  std::fflush(stdout);
  std::fprintf(stderr, "tessera: %s\n", sentence);
  return status;
}
int fail(const std::string& sentence, int status) { return fail(sentence.c_str(), status); }

// `words` are those behind the program's name, which may name a command of a command.
int usage_error(const CLI::App& program, const CLI::ParseError& error, char** words) {
  const CLI::App* command = &program;
  std::string line = "tessera";
  for (; *words && command->get_require_subcommand_min() > 0; ++words) {
    const auto found = command->get_subcommands([&](const CLI::App* one) { return one->get_name() == *words; });
    if (found.empty() && **words == '-') break;
    if (found.empty()) return fail("there is no command '" + std::string(*words) + "' (see `" + line + " --help`).", 2);
    command = found.front(), line += " " + command->get_name();
  }
  std::string sentence = error.what();
  while (!sentence.empty() && (sentence.back() == '\n' || sentence.back() == '.')) sentence.pop_back();
  return fail(sentence + " (see `" + line + " --help`).", 2);
}

// CLI11 writes the help into streams, which end it without a word where memory runs out. This throws instead.
std::string whole_help(const CLI::App& program) {
  static bool ran_out = false;
  const std::new_handler usual = std::set_new_handler([] {
    ran_out = true;
    throw std::bad_alloc();
  });
  const std::string text = program.help();
  std::set_new_handler(usual);
  if (ran_out) throw std::bad_alloc();
  return text;
}

int run_chosen(const std::vector<std::pair<CLI::App*, Action>>& actions) {
  for (const auto& [command, action] : actions)
    if (command->parsed()) return action();
  return 0;
}

// If a standard descriptor is closed, the next open() gets its number, and printed text would go into that file. Closed
// ones are therefore opened on /dev/null, in the mode that makes every read or write fail.
void occupy_standard_descriptors() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (fcntl(descriptor, F_GETFD) == -1) open("/dev/null", descriptor == STDIN_FILENO ? O_WRONLY : O_RDONLY);
}

// SIGPIPE (the reader of standard output is gone) and SIGXFSZ (a file exceeds its size limit) would kill the program
// while it replaces files. Ignored, they become errors of the system call, and the files are rolled back.
void turn_signals_into_errors() {
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
}

// Flushes standard output: write errors of buffered text appear only now.
int end(int status) {
  try {
    require_stdout();
  } catch (const std::exception& error) {
    return status == 0 ? fail(error.what(), 1) : status;
  }
  if (close(STDOUT_FILENO) != 0 && status == 0)
    return fail(std::string("cannot write to standard output: ") + std::strerror(errno) + ".", 1);
  return status;
}

// Parses the command line and runs the command.
int run(int argc, char** argv) {
  CLI::App program("Exact attention, forward and backward, tile by tile.", "tessera");
  use_plain_help(program);
  program.require_subcommand(1);
  program.set_version_flag("--version", "tessera " + version());
  program.footer(
      "Examples:\n"
      "  tessera demo                                    see it work, in half a minute\n"
      "  tessera run --q q.npy --k k.npy --v v.npy --causal\n"
      "  tessera plan --nq 2048 --heads 8 --dim 64 --causal\n"
      "  tessera COMMAND --help                          every option of a command");

  std::vector<std::pair<CLI::App*, Action>> actions;
  for (auto add : {add_demo, add_run, add_check, add_bench, add_plan, add_info, add_pack, add_dist}) {
    Action action = add(program);
    actions.emplace_back(program.get_subcommands({}).back(), std::move(action));
  }

  try {
    program.parse(argc, argv);
  } catch (const CLI::CallForVersion& version) {
    std::printf("%s\n", version.what());
    return 0;
  } catch (const CLI::CallForHelp&) {
    std::fputs(whole_help(program).c_str(), stdout);
    return 0;
  } catch (const CLI::ParseError& error) {
    if (argc == 1) {  // nothing was asked for: the help is the best answer
      std::fputs(whole_help(program).c_str(), stderr);
      return 2;
    }
    return usage_error(program, error, argv + 1);
  }
  return run_chosen(actions);
}

// Prints every error as one sentence. The one for out of memory is a literal: it allocates nothing.
template <class Body>
int guarded(Body body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return fail("not enough memory for this problem.", 1);
  } catch (const std::exception& error) {
    return fail(error.what(), 1);
  }
}

}  // namespace

int main(int argc, char** argv) {
  occupy_standard_descriptors();
  turn_signals_into_errors();
  const int status = guarded([&] { return run(argc, argv); });
  return guarded([&] { return end(status); });
}
