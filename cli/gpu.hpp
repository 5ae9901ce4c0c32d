// SPDX-License-Identifier: Apache-2.0
// What the commands that use a GPU share: whether there is one, tensors on it, planned passes, time by CUDA events.
// Included by cli/demo.cpp and the GPU suites of `tessera bench`.
// Method: docs/benchmarks.md.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cases/device.hpp"
#include "cli/array.hpp"
#include "cuda/driver.hpp"
#include "tessera/tessera.hpp"

namespace tessera::cli {

inline constexpr Device first_gpu{DeviceType::cuda, 0};

// Why no GPU can be used here; empty: one can.
std::string missing_gpu();
// Throws Failure: "`what` needs a GPU: " and the reason.
void require_gpu(const std::string& what);

std::string gpu_name();  // "NVIDIA H200, sm_90a, 132 SMs"
// The library's kernels that take a plain problem on the GPU, best first.
std::vector<std::string> gpu_kernels(Type type = Type::f32);

// A device array: the GPU counterpart of Array.
class GpuArray {
 public:
  explicit GpuArray(const Array& host);
  GpuArray(Type type, const std::vector<std::int64_t>& shape);  // not initialised

  Tensor view() const;
  void read(Array& host) const;

 private:
  Tensor shape;
  std::unique_ptr<cases::DeviceMemory> memory;
};

// The tensors of one self-attention problem on the GPU, both passes: [B,N,H,D], and LSE [B,H,N].
struct GpuAttention {
  GpuAttention(const Array& q, const Array& k, const Array& v, const Array& d_o);

  Inputs inputs() const;
  Outputs outputs() const { return {.o = o.view(), .lse = lse.view()}; }
  Saved saved() const { return {.o = o.view(), .lse = lse.view(), .d_o = d_o.view(), .d_lse = {}}; }
  Gradients gradients() const { return {.dq = dq.view(), .dk = dk.view(), .dv = dv.view(), .dbias = {}, .dsinks = {}}; }

  GpuArray q, k, v, d_o, o, lse, dq, dk, dv;
};

// One pass over such tensors by one kernel (nullptr: the best), planned, with a workspace of its own.
class GpuPass {
 public:
  GpuPass(const GpuAttention& tensors, bool backward, const Options& options, const char* kernel);

  void enqueue() const;
  std::string kernel() const { return plan->kernel(); }
  std::size_t workspace_bytes() const { return plan->workspace_size(); }

 private:
  const GpuAttention& tensors;
  bool backward;
  Options options;
  Execution execution{.device = first_gpu};
  std::unique_ptr<const Plan> plan;
  std::unique_ptr<cases::DeviceMemory> workspace;
};

void wait_for_gpu();

// CUDA-event timer: GPU seconds of the work that a function enqueues on the default stream.
class GpuTimer {
 public:
  GpuTimer();
  ~GpuTimer();
  GpuTimer(const GpuTimer&) = delete;
  GpuTimer& operator=(const GpuTimer&) = delete;

  double seconds(const std::function<void()>& enqueue) const;
  // The median of so many runs, after one warm-up.
  double median_seconds(const std::function<void()>& enqueue, int runs) const;

 private:
  cuda::EventHandle start = nullptr, stop = nullptr;
};

}  // namespace tessera::cli
