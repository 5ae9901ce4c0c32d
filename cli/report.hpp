// SPDX-License-Identifier: Apache-2.0
// What every command says in the same way: numbers with units, tables, JSON files, the machine.
// Included by the commands.
// Implements the `--json FILE` part of docs/tour.md.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "cli/json.hpp"

namespace tessera::cli {

// printf into a string.
[[gnu::format(printf, 1, 2)]] std::string format(const char* pattern, ...);

std::string tflops_text(double operations_per_second);  // "613.20", "0.00112": three digits at least
std::string time_text(double seconds);                  // "1.23 ms"
std::string bytes_text(std::size_t bytes);              // "64.5 MiB"

// A table whose rows appear as they are measured; the headings set the widths, words to the left, numbers to the right.
class Table {
 public:
  struct Column {
    std::string heading;
    int width;
    bool left = false;
  };
  explicit Table(std::vector<Column> columns) : columns(std::move(columns)) {}
  std::string heading() const;
  std::string row(const std::vector<std::string>& cells) const;

 private:
  std::vector<Column> columns;
};

// Processors that this process may run on.
int usable_threads();

// CPU, threads, memory, compiler, version: what makes figures comparable.
Json machine();
std::string compiler();
std::string version();

// Throws Failure where something that was printed did not reach standard output: a full disk, a closed descriptor.
void require_stdout();

// Atomic: the file is complete or absent. Does nothing when the path is empty.
void save_json(const std::string& path, const Json& json);

}  // namespace tessera::cli
