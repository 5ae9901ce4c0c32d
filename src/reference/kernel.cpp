// SPDX-License-Identifier: Apache-2.0
// The float64 reference as a kernel; see kernel.hpp.
#include "reference/kernel.hpp"

#include "core/failure.hpp"
#include "core/once.hpp"
#include "core/parallel.hpp"

namespace tessera::reference {
namespace {

class ReferencePlan : public KernelPlan {
 public:
  ReferencePlan(const Problem& problem, int threads) : problem(problem), threads(threads) {}

  std::size_t workspace_bytes() const override { return 0; }
  std::string describe() const override {
    return text("float64 arithmetic, one row at a time, ", threads, " threads; for checking, not for speed");
  }
  void run(const Call& call) const override {
    if (problem.pass == Pass::forward) forward(problem, call, threads);
    if (problem.pass == Pass::backward) backward(problem, call, threads);
  }

 private:
  Problem problem;
  int threads;
};

class ReferenceKernel : public Kernel {
 public:
  const char* name() const override { return "reference"; }
  DeviceType device() const override { return DeviceType::cpu; }
  PlanOrReason plan(const Problem& problem, const Execution& execution) const override {
    if (problem.options.part_invariant)
      return {nullptr, "part_invariant is set; the reference rounds to float64 in an order of its own in every call"};
    return {std::make_unique<ReferencePlan>(problem, resolve_threads(execution.threads)), ""};
  }
};

}  // namespace

const Kernel& kernel() {
  static constinit Once<const ReferenceKernel> instance;
  return instance.get([] { return ReferenceKernel(); });
}

}  // namespace tessera::reference
