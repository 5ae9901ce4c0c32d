// SPDX-License-Identifier: Apache-2.0
// What the tests on the fake machine share: an environment in which kernels come from the fake compiler, a case on one
// of the fake GPUs, and what every call there must keep. Included by tests/fake, which links the fake libcuda and
// libnvrtc: the library's dlopen finds what is loaded.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "cases/device.hpp"
#include "tests/fake/compiler.hpp"
#include "tests/fake/environment.hpp"
#include "tests/fake/extents.hpp"
#include "tests/fake/machine.hpp"
#include "tests/support/support.hpp"

namespace tessera::test {

inline const std::vector<std::string> gpu_kernels{"hopper", "mma", "vector", "vector_fma", "warp", "tiled", "naive"};

// What a run may ask of the driver: nothing that allocates, copies, loads or waits.
inline bool only_enqueues(const std::vector<const char*>& calls) {
  static const std::set<std::string> allowed{"cuCtxGetCurrent", "cuCtxGetDevice",           "cuCtxPushCurrent",
                                             "cuCtxPopCurrent", "cuDevicePrimaryCtxRetain", "cuTensorMapEncodeTiled",
                                             "cuLaunchKernelEx"};
  return std::all_of(calls.begin(), calls.end(), [](const char* call) { return allowed.contains(call); });
}
// A plan may load, but touches no memory and launches nothing.
inline bool only_plans(const std::vector<const char*>& calls) {
  static const std::set<std::string> forbidden{"cuLaunchKernelEx",  "cuMemAlloc",      "cuMemcpyHtoDAsync",
                                               "cuMemcpyDtoHAsync", "cuMemsetD8Async", "cuStreamSynchronize"};
  return std::none_of(calls.begin(), calls.end(), [](const char* call) { return forbidden.contains(call); });
}

inline std::string joined(const std::vector<std::string>& lines) {
  std::string out;
  for (const std::string& line : lines) out += "\n  " + line;
  return out;
}

inline Plan planned(const FakeCall& c) {
  if (c.pass == FakePass::forward) return Plan::forward(c.in, c.out, c.options, c.execution);
  return Plan::backward(c.in, c.saved, c.grads, c.options, c.execution);
}

inline void run(const Plan& plan, const FakeCall& c) {
  if (c.pass == FakePass::forward) return plan.run(c.in, c.out, c.options, c.execution);
  plan.run(c.in, c.saved, c.grads, c.options, c.execution);
}

// Exactly what a plan asks for, `shift` bytes into an allocation that ends with it.
class Workspace {
 public:
  Workspace(FakeCall& call, const Plan& plan, std::size_t shift = 0) :
      memory(call.execution.device, plan.workspace_size() + shift) {
    call.execution.workspace = static_cast<std::byte*>(memory.data()) + shift;
    call.execution.workspace_bytes = plan.workspace_size();
  }

 private:
  DeviceMemory memory;
};

// A built case on a fake GPU. Nothing is uploaded: nobody reads it.
class OnFake {
 public:
  OnFake(CaseData& data, int device) : data(data), placed(data, {DeviceType::cuda, device}), device(device) {}

  // Points to the kernel's name.
  FakeCall call(FakePass pass, const char* kernel) const {
    FakeCall c{.pass = pass, .in = placed.inputs(), .options = data.options()};
    if (pass == FakePass::forward) c.out = placed.outputs();
    if (data.spec.no_lse) c.out.lse = {};
    if (pass == FakePass::backward) c.saved = placed.saved(), c.grads = placed.gradients();
    c.execution = {.device = {DeviceType::cuda, device}, .kernel = kernel};
    return c;
  }

 private:
  CaseData& data;
  Placed placed;
  int device;
};

// A padded problem whose strides are aligned even where there are no heads, in memory of its own for each tensor.
class Plain {
 public:
  std::int64_t B = 2, Nq = 130, Nk = 130, Hq = 2, Hk = 2, D = 64;
  Type type = Type::bf16;

  FakeCall call(FakePass pass, const char* kernel, int device) {
    where = {DeviceType::cuda, device};
    FakeCall c{.pass = pass};
    c.execution = {.device = where, .kernel = kernel};
    c.options.deterministic = std::string(kernel) != "tiled";
    c.in.q = rows(Nq, Hq), c.in.k = rows(Nk, Hk), c.in.v = rows(Nk, Hk);
    Tensor lse{memory(B * Hq * Nq * 4), Type::f32, {B, Hq, Nq}, where};
    lse.strides = {std::max<std::int64_t>(Hq * Nq, 1), std::max<std::int64_t>(Nq, 1), 1};
    if (pass == FakePass::forward) c.out = {.o = rows(Nq, Hq), .lse = lse};
    if (pass == FakePass::backward) {
      c.saved = {.o = rows(Nq, Hq), .lse = lse, .d_o = rows(Nq, Hq), .d_lse = {}};
      c.grads = {.dq = rows(Nq, Hq), .dk = rows(Nk, Hk), .dv = rows(Nk, Hk), .dbias = {}, .dsinks = {}};
    }
    return c;
  }

  // Of a forward pass; after call().
  State state() {
    const Tensor o{memory(B * Nq * Hq * D * 4), Type::f32, {B, Nq, Hq, D}, where};
    return {.o = o,
            .m = {memory(B * Hq * Nq * 4), Type::f32, {B, Hq, Nq}, where},
            .l = {memory(B * Hq * Nq * 8), Type::f64, {B, Hq, Nq}, where}};
  }

 private:
  void* memory(std::int64_t bytes) {
    held.push_back(std::make_unique<DeviceMemory>(where, static_cast<std::size_t>(bytes)));
    return held.back()->data();
  }
  Tensor rows(std::int64_t N, std::int64_t H) {
    const std::int64_t wide = std::max<std::int64_t>(H, 1) * D;
    Tensor t{memory(B * N * wide * 4), type, {B, N, H, D}, where};
    t.strides = {std::max<std::int64_t>(N, 1) * wide, wide, D, 1};
    return t;
  }
  Device where;
  std::vector<std::unique_ptr<DeviceMemory>> held;
};

// A machine with nothing recorded, and nothing current on this thread; no rule of the driver's may have been broken.
class FakeGpu : public testing::Test {
 protected:
  void SetUp() override {
    fake::machine().forget(), fake::context_stack().clear();
    fake::compiler() = {};
  }
  void TearDown() override {
    EXPECT_EQ(joined(fake::machine().complaints), "");
    fake::machine().forget(), fake::context_stack().clear();
  }
};

template <class Parameter>
class FakeGpuWith : public FakeGpu, public testing::WithParamInterface<Parameter> {};

// What the library promises of a call, whatever the kernel. False: the kernel refuses it. `launches`: how many there
// were.
inline bool keeps_promises(FakeCall call, std::size_t shift, std::size_t& launches) {
  fake::Machine& m = fake::machine();
  const auto stack = fake::context_stack();
  m.forget();
  std::optional<Plan> plan;
  try {
    plan.emplace(planned(call));
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), TESSERA_UNSUPPORTED) << error.what();
    EXPECT_TRUE(m.launches.empty());
    return false;
  }
  EXPECT_TRUE(only_plans(m.calls));
  EXPECT_EQ(fake::context_stack(), stack) << "after planning";
  const Workspace workspace(call, *plan, shift);

  m.forget();
  run(*plan, call);
  EXPECT_TRUE(only_enqueues(m.calls));
  EXPECT_EQ(fake::context_stack(), stack) << "after the run";
  EXPECT_EQ(joined(m.complaints), "");
  Addressed addressed(call);
  for (const fake::Launch& launch : m.launches) {
    EXPECT_EQ(launch.device, call.execution.device.id) << launch.kernel->function;
    EXPECT_EQ(launch.stream, call.execution.stream) << launch.kernel->function;
    addressed.check(launch);
  }
  EXPECT_EQ(joined(addressed.faults()), "");
  // What is asked for is used: all but the room for alignment, and what fills up the last part.
  if (plan->workspace_size() > 0 && !m.launches.empty()) {
    EXPECT_GT(addressed.workspace_end() + 64 + 16, call.workspace().end) << "the workspace is larger than its use";
  }
  launches = m.launches.size();
  return true;
}

// A plain call of a kernel, as a test's parameter.
struct FakeProblem {
  const char* kernel;
  FakePass pass;
  std::int64_t D;  // 256: Hopper's backward pass in two
  friend std::ostream& operator<<(std::ostream& out, const FakeProblem& p) {
    return out << p.kernel << (p.pass == FakePass::forward ? "_forward_" : "_backward_") << p.D;
  }
};

// GPUs take turns, so that every kernel meets every one of them; `hopper` has one only, and `mma` not the first, which
// has no bf16.
inline int device_for(const std::string& kernel, std::size_t turn) {
  const fake::Machine& m = fake::machine();
  if (kernel == "hopper") return m.device_of(9, 0);
  if (kernel == "mma") return static_cast<int>(1 + turn % (m.gpus.size() - 1));
  return static_cast<int>(turn % m.gpus.size());
}

}  // namespace tessera::test
