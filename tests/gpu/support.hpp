// SPDX-License-Identifier: Apache-2.0
// What the GPU tests share: the skip where there is no GPU, a built case on the GPU with its plans, streams.
// Included by the tests in this folder; each of them uses a fixture below. Implements docs/testing.md.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cases/device.hpp"
#include "cuda/device.hpp"
#include "cuda/driver.hpp"
#include "cuda/jit/nvrtc.hpp"
#include "ladder/ladder.hpp"
#include "tests/support/support.hpp"

namespace tessera::test {

inline constexpr Device gpu{DeviceType::cuda, 0};
inline constexpr const char* vector_rung = "vector";
inline constexpr const char* hopper_kernel = "hopper";
inline constexpr const char* mma_kernel = "mma";
inline constexpr const char* early_rungs[] = {"warp", "tiled", "naive"};  // take nothing but what is_plain() allows

// Best first.
inline std::vector<std::string> all_rungs() {
  std::vector<std::string> names;
  for (const gpu::Algorithm& rung : ladder::algorithms()) names.push_back(rung.name);
  return names;
}
// Those that take everything.
inline std::vector<std::string> general_rungs() {
  std::vector<std::string> names = all_rungs();
  for (const char* early : early_rungs) std::erase(names, early);
  return names;
}
// Those that are deterministic in both passes.
inline std::vector<std::string> exact_rungs() {
  std::vector<std::string> names = all_rungs();
  std::erase(names, "tiled");
  return names;
}
inline bool is_general(const std::string& rung) {
  const std::vector<std::string> names = general_rungs();
  return std::find(names.begin(), names.end(), rung) != names.end();
}

// Why there is nothing to test here; empty: there is.
inline std::string what_is_missing() {
  const std::string& driver = cuda::find_driver().reason;
  return driver.empty() ? cuda::find_nvrtc().reason : driver;
}

// Skips without a GPU, and holds its context current, as a program that uses the CUDA runtime does.
class Gpu : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = what_is_missing(); !reason.empty()) GTEST_SKIP() << "no GPU to test: " << reason;
    current.emplace(gpu.id);
  }

 private:
  std::optional<cuda::CurrentDevice> current;
};

template <class Parameter>
class GpuWith : public Gpu, public testing::WithParamInterface<Parameter> {};

// The same for what only a Hopper GPU can do.
class Hopper : public Gpu {
 protected:
  void SetUp() override {
    Gpu::SetUp();
    if (!IsSkipped() && cuda::properties(gpu.id).major != 9) GTEST_SKIP() << "no GPU to test: it is not a Hopper";
  }
};

template <class Parameter>
class HopperWith : public Hopper, public testing::WithParamInterface<Parameter> {};

// What the early rungs are written for; they may still refuse some of it (a head that fits no tile).
inline bool is_plain(const Case& c) {
  return !c.mask && !c.bias && c.slopes == Slopes::none && c.sinks == Sinks::none && c.options.softcap == 0 &&
         c.options.dropout == 0 && !c.options.accumulate;
}

// The same shapes, lengths, layouts and types without what only `vector` takes.
inline Case made_plain(Case c) {
  c.mask = c.bias = false, c.slopes = Slopes::none, c.sinks = Sinks::none;
  c.options.softcap = c.options.dropout = 0, c.options.seed = c.options.seed_offset = 0, c.rng = false;
  c.options.accumulate = false;
  if (!c.grads.dq && !c.grads.dk && !c.grads.dv) c.grads.dq = true;  // what was asked for is gone
  c.name += "_plain";
  return c;
}

inline void wait_for(cuda::StreamHandle stream) {
  cuda::check(cuda::driver().stream_synchronize(stream), "cuStreamSynchronize");
}

// One that does not wait for the default stream, nor that one for it.
class Stream {
 public:
  Stream() {
    constexpr unsigned non_blocking = 1;
    cuda::check(cuda::driver().stream_create(&handle, non_blocking), "cuStreamCreate");
  }
  ~Stream() { cuda::driver().stream_destroy(handle); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cuda::StreamHandle() const { return handle; }

 private:
  cuda::StreamHandle handle = nullptr;
};

// A built case on the GPU, planned, with a workspace of its own. forward() and backward() only enqueue. Throws
// tessera::Error where the kernel refuses the case. Stays where it is: the execution points into it.
class OnGpu {
 public:
  OnGpu(CaseData& built, const std::string& kernel, cuda::StreamHandle stream = nullptr) :
      data(built), placed(built, gpu), name(kernel), execution{.device = gpu, .stream = stream, .kernel = name.c_str()},
      forward_plan(Plan::forward(placed.inputs(), placed.outputs(), data.options(), execution)) {
    std::size_t bytes = forward_plan.workspace_size();
    if (data.spec.backward) {
      backward_plan.emplace(
          Plan::backward(placed.inputs(), placed.saved(), placed.gradients(), data.options(), execution));
      bytes = std::max(bytes, backward_plan->workspace_size());
    }
    workspace = std::make_unique<DeviceMemory>(gpu, bytes);
    workspace->fill(std::byte{0xFF});
    execution.workspace = workspace->data(), execution.workspace_bytes = bytes;
    placed.upload();
  }

  // From here on the backward pass has other options.
  void plan_backward(const Options& other) {
    data.spec.options = other;
    backward_plan.emplace(
        Plan::backward(placed.inputs(), placed.saved(), placed.gradients(), data.options(), execution));
    if (backward_plan->workspace_size() > execution.workspace_bytes)
      throw std::logic_error("other options need a larger workspace");
  }

  void forward() const { forward_plan.run(placed.inputs(), placed.outputs(), data.options(), execution); }
  void backward() const {
    if (backward_plan)
      backward_plan->run(placed.inputs(), placed.saved(), placed.gradients(), data.options(), execution);
  }
  void run() const { forward(), backward(); }

  void upload() { placed.upload(); }
  // Waits for the stream, then copies everything back.
  void download() {
    wait_for(static_cast<cuda::StreamHandle>(execution.stream));
    placed.download();
  }
  // The same after a run: what is the same in two runs must have been written by them.
  void finish() {
    download();
    std::vector<std::pair<const char*, const Buffer*>> results{{"o", &data.o}, {"lse", &data.lse}};
    if (backward_plan) results = {{"dq", &data.dq}, {"dk", &data.dk}, {"dv", &data.dv}};
    for (const auto& [result, buffer] : results) {
      std::int64_t e = 0;  // rows before the first sequence stay as they are
      while (e < buffer->elements() && buffer->untouched(e)) ++e;
      EXPECT_TRUE(e < buffer->elements() || buffer->elements() == 0) << result << " was not written";
    }
  }

  CaseData& data;
  Placed placed;
  const std::string name;  // of the kernel; the execution points to it
  Execution execution;

 private:
  Plan forward_plan;
  std::optional<Plan> backward_plan;
  std::unique_ptr<DeviceMemory> workspace;
};

// The case's results on a rung; nothing where an early rung refuses what it may refuse.
inline std::optional<CaseData> ran_on(const std::string& rung, const Case& spec) {
  CaseData data = build(spec);
  try {
    OnGpu on(data, rung);
    on.run();
    on.finish();
  } catch (const Error& error) {
    if (error.status() != TESSERA_UNSUPPORTED || is_general(rung) || is_plain(spec)) throw;
    return {};
  }
  return data;
}

}  // namespace tessera::test
