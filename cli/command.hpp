// SPDX-License-Identifier: Apache-2.0
// The commands of the `tessera` program: one function each, implemented in the file of the same name.
// Included by cli/main.cpp and by the commands themselves.
// Implements the command line described in docs/tour.md.
#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace tessera::cli {

// What a command does once its arguments are parsed. The value is the exit status: 0, or 1 when something was found
// wrong (errors that end a command early are exceptions).
using Action = std::function<int()>;

// Each adds its subcommand with its flags and its help to the program, and returns what to do when it is chosen.
Action add_demo(CLI::App& program);
Action add_run(CLI::App& program);
Action add_check(CLI::App& program);
Action add_bench(CLI::App& program);
Action add_plan(CLI::App& program);
Action add_info(CLI::App& program);
Action add_pack(CLI::App& program);
Action add_dist(CLI::App& program);

}  // namespace tessera::cli
