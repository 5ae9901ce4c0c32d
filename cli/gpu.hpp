// SPDX-License-Identifier: Apache-2.0
// What the commands that use a GPU share: whether there is one, tensors on it, planned passes, their time. A GPU is
// the first one of CUDA, or the first Vulkan device. Included by cli/demo.cpp and the GPU suites of `tessera bench`.
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

inline constexpr Device first_gpu{DeviceType::cuda, 0}, first_vulkan{DeviceType::vulkan, 0};

// Why there is no such GPU here; empty: there is.
std::string missing_gpu(Device gpu = first_gpu);
// Throws Failure: "`what` needs a GPU: " and the reason.
void require_gpu(const std::string& what, Device gpu = first_gpu);
// The same for `command --device NAME`; any CPU is there.
void require_device(const std::string& command, const std::string& name);

std::string gpu_name(Device gpu = first_gpu);  // "NVIDIA H200, sm_90a, 132 SMs"
// The library's kernels that take a plain problem on the GPU, best first.
std::vector<std::string> gpu_kernels(Type type = Type::f32, Device gpu = first_gpu);

// A device array: the GPU counterpart of Array.
class GpuArray {
 public:
  explicit GpuArray(const Array& host, Device gpu = first_gpu);
  GpuArray(Type type, const std::vector<std::int64_t>& shape, Device gpu = first_gpu);  // not initialised

  Tensor view() const;
  void read(Array& host) const;

 private:
  Tensor shape;
  std::unique_ptr<cases::DeviceMemory> memory;
};

// The tensors of one self-attention problem on the GPU, both passes: [B,N,H,D], and LSE [B,H,N].
struct GpuAttention {
  GpuAttention(const Array& q, const Array& k, const Array& v, const Array& d_o, Device gpu = first_gpu);

  Inputs inputs() const;
  Outputs outputs() const { return {.o = o.view(), .lse = lse.view()}; }
  Saved saved() const { return {.o = o.view(), .lse = lse.view(), .d_o = d_o.view(), .d_lse = {}}; }
  Gradients gradients() const { return {.dq = dq.view(), .dk = dk.view(), .dv = dv.view(), .dbias = {}, .dsinks = {}}; }

  Device gpu;
  GpuArray q, k, v, d_o, o, lse, dq, dk, dv;
};

// So many tokens that a benchmark of all kernels ends: 4096, or, on a Vulkan device that is slower, the largest smaller
// power of two at which the simplest kernel does a forward pass in half a second, or has a plan at all.
std::int64_t fitting_tokens(std::int64_t B, std::int64_t H, std::int64_t D, Device gpu);

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
  Execution execution{};
  std::unique_ptr<const Plan> plan;
  std::unique_ptr<cases::DeviceMemory> workspace;
};

void wait_for_gpu();

// Seconds of the work that a function enqueues: GPU seconds on the default stream, by CUDA events. On a Vulkan device
// wall-clock seconds: its calls submit their work and return when the fence says that it is done.
class GpuTimer {
 public:
  explicit GpuTimer(Device gpu = first_gpu);
  ~GpuTimer();
  GpuTimer(const GpuTimer&) = delete;
  GpuTimer& operator=(const GpuTimer&) = delete;

  double seconds(const std::function<void()>& enqueue) const;
  // The median of so many runs, after one warm-up.
  double median_seconds(const std::function<void()>& enqueue, int runs) const;

 private:
  Device gpu;
  cuda::EventHandle start = nullptr, stop = nullptr;
};

// What a function enqueues on a stream, captured: launches without the host's time. CUDA only.
class GpuGraph {
 public:
  explicit GpuGraph(const std::function<void(cuda::StreamHandle stream)>& enqueue);  // runs it once first
  ~GpuGraph();
  GpuGraph(const GpuGraph&) = delete;
  GpuGraph& operator=(const GpuGraph&) = delete;

  void launch() const;  // on the default stream

 private:
  void release();

  cuda::StreamHandle stream = nullptr;
  cuda::GraphHandle graph = nullptr;
  cuda::GraphExecHandle exec = nullptr;
};

}  // namespace tessera::cli
