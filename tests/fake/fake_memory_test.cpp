// SPDX-License-Identifier: Apache-2.0
// Calls on a fake GPU with an allocation of the host that fails: for every n the n-th of a run, and of making a plan. A
// call that fails has launched nothing, has a status and a sentence, and the next one works.
// Links tessera_cases, the fake libcuda and NVRTC, and faults.cpp. Implements the header's "Rules of the ABI".
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "tests/fake/support.hpp"
#include "tests/support/faults.hpp"

namespace tessera::test {
namespace {

// Exit status of a forked child that runs body; 99: it crashed.
int in_child(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(100);
    _exit(body());
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 99;
}

enum Outcome { failed_well = 0, nothing_failed, launched, other_status, no_sentence, next_fails };

// What became of `call` while the n-th allocation failed.
Outcome with_failure(long n, Failing failing, const std::function<tessera_status()>& call) {
  fake::machine().launches.clear();
  fail_allocations(n, failing);
  const tessera_status status = call();
  const bool failed = stop_counting().failed > 0;
  if (!failed) return nothing_failed;
  if (status == TESSERA_OK) return failed_well;
  if (!fake::machine().launches.empty()) return launched;
  if (status != TESSERA_OUT_OF_MEMORY) return other_status;
  if (std::string(tessera_last_error()) != "out of memory") return no_sentence;
  return call() == TESSERA_OK ? failed_well : next_fails;
}

class FakeMemory : public FakeGpuWith<FakeProblem> {
 protected:
  void SetUp() override {
    FakeGpuWith<FakeProblem>::SetUp();
    if (TESSERA_TEST_SANITIZED) GTEST_SKIP() << "the fake libraries' own allocations would fail";
    static const bool spared = (spare_library(&fake::machine()), spare_library(&fake::compiler()), true);
    ASSERT_TRUE(spared);
  }
};

// The C structs of a call, which need no memory.
struct Structs {
  const FakeCall& c;
  detail::CInputs in{c.in};
  detail::COutputs out{c.out};
  detail::CSaved saved{c.saved};
  detail::CGradients grads{c.grads};
  tessera_options options = detail::to_c(c.options);

  tessera_status plan(tessera_plan** made) const {
    const tessera_execution e = detail::to_c(c.execution);
    if (c.pass == FakePass::forward) return tessera_plan_forward(&in.view, &out.view, &options, &e, made);
    return tessera_plan_backward(&in.view, &saved.view, &grads.view, &options, &e, made);
  }
  tessera_status run(const tessera_plan* plan) const {
    const tessera_execution e = detail::to_c(c.execution);
    if (c.pass == FakePass::forward) return tessera_plan_run_forward(plan, &in.view, &out.view, &options, &e);
    return tessera_plan_run_backward(plan, &in.view, &saved.view, &grads.view, &options, &e);
  }
};

// Everything happens in children, so that each try is a process's first call.
TEST_P(FakeMemory, NothingIsLaunchedByACallThatFails) {
  const auto try_run = [&](long n, Failing failing) {
    return in_child([&]() -> int {
      const int device = fake::machine().device_of(9, 0);
      fake::context_stack() = {fake::make_context(device)};
      Plain plain;
      plain.D = GetParam().D, plain.Nq = plain.Nk = 30'000;
      FakeCall call = plain.call(GetParam().pass, GetParam().kernel, device);
      call.options.causal = true;
      const Plan plan = planned(call);
      const Workspace workspace(call, plan);
      const Structs structs{call};
      tessera_plan* raw = nullptr;
      if (structs.plan(&raw) != TESSERA_OK) return other_status;
      return with_failure(n, failing, [&] { return structs.run(raw); });
    });
  };
  const auto try_plan = [&](long n, Failing failing) {
    return in_child([&]() -> int {
      const int device = fake::machine().device_of(9, 0);
      fake::context_stack() = {fake::make_context(device)};
      Plain plain;
      plain.D = GetParam().D;
      const FakeCall call = plain.call(GetParam().pass, GetParam().kernel, device);
      const Structs structs{call};
      return with_failure(n, failing, [&] {
        tessera_plan* raw = nullptr;
        const tessera_status status = structs.plan(&raw);
        tessera_plan_destroy(raw);
        return status;
      });
    });
  };
  for (const Failing failing : {Failing::once, Failing::always}) {
    for (long n = 1, outcome = failed_well; outcome == failed_well; ++n) {
      outcome = try_run(n, failing);
      ASSERT_LE(outcome, nothing_failed) << "a run, allocation " << n;
    }
    // Thousands: each of the first ones, and then every 41st.
    for (long n = 1, outcome = failed_well; outcome == failed_well; n += n < 100 ? 1 : 41) {
      outcome = try_plan(n, failing);
      ASSERT_LE(outcome, nothing_failed) << "a plan, allocation " << n;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Problems, FakeMemory,
                         testing::Values(FakeProblem{"hopper", FakePass::forward, 64},
                                         FakeProblem{"hopper", FakePass::backward, 128},
                                         FakeProblem{"hopper", FakePass::backward, 256},
                                         FakeProblem{"vector", FakePass::backward, 64}),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace tessera::test
