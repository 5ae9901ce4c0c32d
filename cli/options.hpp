// SPDX-License-Identifier: Apache-2.0
// Flags that several commands share: what to compute (tessera::Options), where and how to run (tessera::Execution).
// Included by the commands.
// The meaning of every option: docs/algorithm.md.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/types.hpp"

namespace CLI {
class App;
}

namespace tessera::cli {

class AttentionFlags {
 public:
  void add_to(CLI::App& command);
  Options options() const;  // after parsing

 private:
  Options values;
  std::string alignment;
  std::vector<std::int64_t> window;
  bool nondeterministic = false;
};

class ExecutionFlags {
 public:
  void add_to(CLI::App& command);
  Execution execution() const;  // valid as long as this object lives: it holds the kernel's name
  int threads() const;          // the number that 0 stands for
  const std::string& device_name() const { return device; }  // empty: not given

 private:
  std::string kernel, device;
  int thread_count = 0;
};

// Adds `--type f32|f16|bf16|f64`. The name stays empty when it is not given.
void add_type_flag(CLI::App& command, std::string& name, const std::string& help);
Type type_named(const std::string& name);

// Adds `--json FILE`.
void add_json_flag(CLI::App& command, std::string& path);

}  // namespace tessera::cli
