// SPDX-License-Identifier: Apache-2.0
// Dispatch, the cache of plans, and running them; see attention.hpp.
#include "api/attention.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "api/kernels.hpp"
#include "core/append.hpp"
#include "core/check.hpp"
#include "core/check_parts.hpp"
#include "core/failure.hpp"
#include "core/parallel.hpp"
#include "core/per_thread.hpp"
#include "core/tensor.hpp"
#include "cpu/kernels.hpp"
#include "gpu/append.hpp"
#include "gpu/merge.hpp"

namespace tessera::api {
namespace {

constexpr std::size_t workspace_alignment = 64;

// Execution::kernel names a kernel or a family of them; null: any.
bool asked_for(const char* name, const Kernel& kernel) {
  return !name || std::string_view(name) == kernel.name() || std::string_view(name) == kernel.family();
}

const char* name_of(DeviceType type) {
  if (type == DeviceType::cpu) return "cpu";
  return type == DeviceType::cuda ? "cuda" : "vulkan";
}

// Kernels of other devices are not asked, and are spoken of only if the call names one.
bool runs_there(const Kernel& kernel, const Problem& problem) { return kernel.device() == problem.device.type; }

bool known(const char* name) {
  return std::ranges::any_of(kernels(), [&](const Kernel* kernel) { return asked_for(name, *kernel); });
}

}  // namespace

std::size_t Planned::workspace_bytes() const {
  const std::size_t bytes = plan->workspace_bytes();
  return bytes == 0 ? 0 : bytes + workspace_alignment;
}

Planned choose(const Problem& problem, const Execution& execution) {
  if (!known(execution.kernel)) invalid("kernel: is '", execution.kernel, "'; must be one of ", kernel_names());
  std::vector<std::pair<std::string, std::string>> refused;  // names of kernels, and the reason that they share
  for (const Kernel* kernel : kernels()) {
    if (!asked_for(execution.kernel, *kernel)) continue;
    std::string reason;
    if (runs_there(*kernel, problem)) {
      PlanOrReason result = kernel->plan(problem, execution);
      if (result.plan) return {problem, kernel, std::move(result.plan), ""};
      reason = std::move(result.reason);
    } else if (execution.kernel) {
      reason = text("device is ", name_of(problem.device), "; this kernel runs on ", name_of(kernel->device()));
    } else {
      continue;
    }
    const auto same = std::ranges::find(refused, reason, &std::pair<std::string, std::string>::second);
    if (same == refused.end())
      refused.emplace_back(kernel->name(), std::move(reason));
    else
      same->first += text(", ", kernel->name());
  }
  std::string reasons;
  for (const auto& [names, reason] : refused) reasons += text(reasons.empty() ? "" : "; ", names, ": ", reason);
  throw Failure(TESSERA_UNSUPPORTED, "no kernel can run this: " + reasons);
}

std::shared_ptr<const Planned> choose_cached(const Problem& problem, const Execution& execution) {
  // The cache key must contain everything that choose() reads: a plan must never be found by a call that differs in
  // anything it depends on.
  struct Entry {
    std::shared_ptr<const Planned> planned;
    int threads = 0, sm_margin = 0;
    bool stream = false;  // whether one is given: a Vulkan plan without one asks the library's own device
    std::optional<std::string> kernel;
  };
  struct Kept {
    std::array<Entry, 8> entries;
    std::size_t oldest = 0;
  };
  static constinit PerThread<Kept> kept_plans;
  Kept* kept = kept_plans.get();
  const auto kernel = execution.kernel ? std::optional<std::string>(execution.kernel) : std::nullopt;
  const bool stream = execution.stream != nullptr;
  if (kept)
    for (const Entry& e : kept->entries)
      if (e.planned && e.threads == execution.threads && e.sm_margin == execution.sm_margin && e.stream == stream &&
          e.kernel == kernel && e.planned->problem == problem)
        return e.planned;
  Entry made{std::make_shared<const Planned>(choose(problem, execution)), execution.threads, execution.sm_margin,
             stream, kernel};
  if (!kept) return made.planned;
  Entry& e = kept->entries[kept->oldest++ % kept->entries.size()];
  e = std::move(made);
  return e.planned;
}

std::string describe(const Planned& planned, const Execution& execution) {
  std::string out =
      text("problem        ", text_of(planned.problem), "\nkernel         ", planned.kernel->name(), "\n");
  out += text("               ", planned.plan->describe(), "\nworkspace      ", planned.workspace_bytes(), " bytes\n");
  bool chosen = false;
  for (const Kernel* kernel : kernels()) {
    if (kernel == planned.kernel) chosen = true;
    if (kernel == planned.kernel || !runs_there(*kernel, planned.problem)) continue;
    const std::string reason = kernel->refusal(planned.problem, execution);
    std::string verdict = "refused: " + reason;
    if (reason.empty()) verdict = chosen ? "could run it, but is slower" : "could run it, but another was asked for";
    std::string label = text("not ", kernel->name());
    label.resize(std::max<std::size_t>(label.size() + 1, 15), ' ');
    out += text(label, verdict, "\n");
  }
  return out;
}

void run(const Planned& planned, const Problem& asked, Call call) {
  Problem question = asked;
  if (planned.problem.alignment > asked.alignment)
    invalid("plan: was made for pointers and strides aligned to ", planned.problem.alignment,
            " bytes but these are aligned to ", asked.alignment, "; plan with the tensors that are run");
  question.alignment = planned.problem.alignment;
  if (question != planned.problem)
    invalid("plan: was made for ", text_of(planned.problem), " but the call asks for ", text_of(asked));
  check_run(asked, call);
  check_cuts(asked, call, planned.plan->tiles());

  Execution& e = call.execution;
  const std::size_t bytes = planned.workspace_bytes();
  if (e.workspace && e.workspace_bytes < bytes)
    invalid("workspace_bytes: is ", e.workspace_bytes, " but this plan needs ", bytes);
  if (e.workspace) check_workspace(call, bytes);
  std::unique_ptr<void, decltype(&std::free)> owned(nullptr, &std::free);
  if (!e.workspace && bytes > 0) {
    if (asked.device.type != DeviceType::cpu)
      invalid("workspace: is null but this plan needs ", bytes, " bytes on ", name_of(asked.device),
              "; nothing is allocated on a device but by its caller");
    owned.reset(std::malloc(bytes));
    if (!owned) throw Failure(TESSERA_OUT_OF_MEMORY, text("workspace: ", bytes, " bytes could not be allocated"));
    e.workspace = owned.get();
  }
  const auto address = reinterpret_cast<std::uintptr_t>(e.workspace);
  e.workspace =
      static_cast<char*>(e.workspace) + (workspace_alignment - address % workspace_alignment) % workspace_alignment;
  planned.plan->run(call);
}

void append(const AppendArgs& args, const Execution& execution) {
  const Appending call = check_append(args, execution);
  if (args.k.device.type == DeviceType::cuda) return gpu::append(call, execution);
  cpu::append(args, find_rows(call), resolve_threads(execution.threads));
}

void merge(std::span<const Outputs> partials, const Outputs& merged, const Execution& execution) {
  check_merge(partials, merged, execution);
  if (merged.o.device.type == DeviceType::cuda) return gpu::merge(partials, merged, execution);
  cpu::merge(partials, merged, resolve_threads(execution.threads));
}

void dropout_mask(const Tensor& mask, const Tensor& rng, const Options& options, const Execution& execution) {
  check_dropout_mask(mask, rng, options, execution);
  cpu::dropout_mask(mask, rng, options, resolve_threads(execution.threads));
}

}  // namespace tessera::api
