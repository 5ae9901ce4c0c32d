// SPDX-License-Identifier: Apache-2.0
// Dispatch: from a checked problem to a kernel, choosing a plan and running it. Included by api/c_api.cpp only: users
// come through the C ABI. Implements docs/architecture.md, "One call".
#pragma once

#include <memory>
#include <span>
#include <string>

#include "core/kernel.hpp"

namespace tessera::api {

// A plan together with its problem and kernel.
struct Planned {
  Problem problem;
  const Kernel* kernel = nullptr;
  std::unique_ptr<const KernelPlan> plan;
  std::string description;  // only when asked for; see describe()

  std::size_t workspace_bytes() const;  // what a caller must supply, slack for alignment included
};

// The best kernel that has a plan for the problem, or the one that the execution names. Throws Failure with every
// kernel's reason for refusing.
Planned choose(const Problem& problem, const Execution& execution);

// The same with a thread-local cache of the last few plans: a program that calls forward() in a loop plans once.
std::shared_ptr<const Planned> choose_cached(const Problem& problem, const Execution& execution);

// Human-readable: the problem, the choice, and why other kernels were not chosen.
std::string describe(const Planned& planned, const Execution& execution);

// Runs a plan. `asked` is the call's own problem; it must equal the plan's, with pointers at least as aligned.
void run(const Planned& planned, const Problem& asked, Call call);

void append(const AppendArgs& args, const Execution& execution);
void merge(std::span<const Outputs> partials, const Outputs& merged, const Execution& execution);
void dropout_mask(const Tensor& mask, const Tensor& rng, const Options& options, const Execution& execution);

std::string kernel_names();  // comma-separated, best first

// Processor, instruction sets, threads, kernels, GPUs, NVRTC, cache: one fact a line.
std::string info();

}  // namespace tessera::api
