// SPDX-License-Identifier: Apache-2.0
// Implements cli/options.hpp.
// The flags carry the names of the fields; only their values' syntax is checked here, their rules in the library.
#include "cli/options.hpp"

#include "cli/array.hpp"
#include "cli/failure.hpp"
#include "cli/flags.hpp"
#include "cli/report.hpp"

namespace tessera::cli {

void AttentionFlags::add_to(CLI::App& command) {
  const char* group = "What to compute";
  const FlagStyle x{.value = "X", .group = group}, n{.value = "N", .group = group};
  add_flag(command, "--scale", "Factor of q.k (default: 1/sqrt(D))", values.scale, x);
  add_flag(command, "--softcap", "Scores become X * tanh(score / X) (default: 0, none)", values.softcap, x);
  add_flag(command, "--causal", "Query i sees key j only if j <= i + offset", values.causal, {.group = group});
  add_flag(command, "--window", "Query i sees keys i + offset - L to i + offset + R, both included; -1: no bound",
           window, {.value = "L,R", .group = group, .count = 2});
  add_flag(command, "--alignment",
           "Where the diagonal lies: bottom-right (offset Nk - Nq, the default), top-left (0) or offset", alignment,
           {.value = "NAME", .group = group, .choices = {"bottom-right", "top-left", "offset"}});
  add_flag(command, "--diagonal-offset", "The offset itself (implies --alignment offset)", values.diagonal_offset, n);
  add_flag(command, "--dropout", "Probability of dropping, in [0, 1)", values.dropout, x);
  add_flag(command, "--seed", "Dropout's seed", values.seed, n);
  add_flag(command, "--seed-offset", "Dropout's offset", values.seed_offset, n);
  add_flag(command, "--row0", "Position of query 0 in a larger whole, from -2^48 to 2^48; so the next three",
           values.row0, n);
  add_flag(command, "--col0", "Position of key 0", values.col0, n);
  add_flag(command, "--head0", "Number of head 0", values.head0, n);
  add_flag(command, "--batch0", "Number of sequence 0", values.batch0, n);
  add_flag(command, "--max-seqlen-q", "Upper bound of the packed queries' lengths", values.max_seqlen_q, n);
  add_flag(command, "--max-seqlen-k", "Upper bound of the packed keys' lengths", values.max_seqlen_k, n);
  add_flag(command, "--nondeterministic", "GPUs may add up gradients in any order: bits may vary between runs",
           nondeterministic, {.group = group});
}

Options AttentionFlags::options() const {
  Options options = values;
  if (alignment == "top-left") options.alignment = Alignment::top_left;
  if (alignment == "offset" || (alignment.empty() && options.diagonal_offset != 0))
    options.alignment = Alignment::offset;
  if (!window.empty()) options.window_left = window[0], options.window_right = window[1];
  options.deterministic = !nondeterministic;
  return options;
}

void ExecutionFlags::add_to(CLI::App& command) {
  const char* group = "Where and how to run";
  add_flag(command, "--device", "cpu, cuda or vulkan (default: cpu)", device,
           {.value = "NAME", .group = group, .choices = {"cpu", "cuda", "vulkan"}});
  add_flag(command, "--kernel", "Force a kernel by its name; `tessera info` lists them (default: the best)", kernel,
           {.value = "NAME", .group = group});
  add_flag(command, "--threads", "Number of threads (default: 0, all that this process may use)", thread_count,
           {.value = "N", .group = group, .least = 0, .most = 4096});
}

Execution ExecutionFlags::execution() const {
  Execution execution;
  execution.device.type = device == "cuda"     ? DeviceType::cuda
                          : device == "vulkan" ? DeviceType::vulkan
                                               : DeviceType::cpu;
  execution.threads = thread_count;
  execution.kernel = kernel.empty() ? nullptr : kernel.c_str();
  return execution;
}

int ExecutionFlags::threads() const { return thread_count > 0 ? thread_count : usable_threads(); }

void add_type_flag(CLI::App& command, std::string& name, const std::string& help) {
  add_flag(command, "--type", help, name, {.value = "TYPE", .choices = {"f32", "f16", "bf16", "f64"}});
}

void add_json_flag(CLI::App& command, std::string& path) {
  add_flag(command, "--json", "Also write the figures to this file, as JSON", path, {.value = "FILE"});
}

Type type_named(const std::string& name) {
  for (const Type type : {Type::f64, Type::f32, Type::f16, Type::bf16, Type::e4m3, Type::i8})
    if (name == name_of(type)) return type;
  throw Failure("there is no type " + name + ".");
}

}  // namespace tessera::cli
