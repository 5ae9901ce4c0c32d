// SPDX-License-Identifier: Apache-2.0
// Implements cli/gpu.hpp over the CUDA driver, and over the library's own device of Vulkan.
// Everything runs on the first GPU and its default stream.
#include "cli/gpu.hpp"

#include <sstream>

#include "cli/failure.hpp"
#include "cli/report.hpp"
#include "cli/timing.hpp"
#include "cuda/device.hpp"
#include "tessera/vulkan.h"

namespace tessera::cli {
namespace {

std::size_t bytes_of(const Tensor& t) { return static_cast<std::size_t>(t.elements()) * size_of(t.type); }

Tensor contiguous(Type type, const std::vector<std::int64_t>& shape, Device gpu) {
  Tensor t;
  t.type = type, t.ndim = static_cast<std::int32_t>(shape.size()), t.device = gpu;
  std::int64_t stride = 1;
  for (std::size_t d = shape.size(); d-- > 0;) t.shape[d] = shape[d], t.strides[d] = stride, stride *= shape[d];
  return t;
}

// What `tessera info` says of one thing.
std::string info_line(const std::string& name) {
  const std::string text = "\n" + tessera::info(), start = "\n" + name + " ";
  const std::size_t at = text.find(start);
  if (at == std::string::npos) return "";
  const std::size_t begin = text.find_first_not_of(' ', at + start.size()), end = text.find('\n', begin);
  return text.substr(begin, end - begin);
}

std::vector<std::int64_t> lse_shape(const Array& q) { return {q.shape()[0], q.shape()[2], q.shape()[1]}; }

}  // namespace

std::string missing_gpu(Device gpu) {
  if (gpu.type == DeviceType::cuda) return cuda::find_driver().reason;
  std::int32_t count = 0;
  return tessera_vulkan_device_count(&count) == TESSERA_OK ? "" : tessera_last_error();
}

void require_gpu(const std::string& what, Device gpu) {
  const char* needed = gpu.type == DeviceType::cuda ? " needs a GPU: " : " needs a Vulkan device: ";
  if (const std::string reason = missing_gpu(gpu); !reason.empty()) throw Failure(what + needed + reason + ".");
}

void require_device(const std::string& command, const std::string& name) {
  if (name == "cuda") require_gpu(command + " --device cuda", first_gpu);
  if (name == "vulkan") require_gpu(command + " --device vulkan", first_vulkan);
}

std::string gpu_name(Device gpu) {
  if (gpu.type == DeviceType::vulkan) {
    const std::string all = info_line("Vulkan");
    return all.substr(0, all.find(';'));
  }
  const cuda::Properties& p = cuda::properties(first_gpu.id);
  return format("%s, %s, %d SMs", p.name.c_str(), p.architecture().c_str(), p.multiprocessors);
}

std::vector<std::string> gpu_kernels(Type type, Device gpu) {
  const Tensor x(nullptr, type, {1, 64, 1, 64}, gpu);
  Inputs inputs;
  inputs.q = inputs.k = inputs.v = x;
  std::vector<std::string> names;
  std::istringstream words(info_line("kernels"));
  words.exceptions(std::ios::badbit);  // out of memory is not the end of the text
  for (std::string word; words >> word;) {
    if (word.back() == ',') word.pop_back();
    try {
      Plan::forward(inputs, {.o = x, .lse = {}}, {}, {.device = gpu, .kernel = word.c_str()});
      names.push_back(word);
    } catch (const Error& error) {
      if (error.status() != TESSERA_UNSUPPORTED) throw;  // expected of kernels for other devices
    }
  }
  return names;
}

GpuArray::GpuArray(Type type, const std::vector<std::int64_t>& sizes, Device gpu) :
    shape(contiguous(type, sizes, gpu)), memory(std::make_unique<cases::DeviceMemory>(gpu, bytes_of(shape))) {
  shape.data = memory->data();
}

GpuArray::GpuArray(const Array& host, Device gpu) : GpuArray(host.type(), host.shape(), gpu) {
  memory->write(host.data<std::byte>(), host.bytes());
}

Tensor GpuArray::view() const { return shape; }

void GpuArray::read(Array& host) const { memory->read(host.data<std::byte>(), host.bytes()); }

GpuAttention::GpuAttention(const Array& q_, const Array& k_, const Array& v_, const Array& d_o_, Device gpu_) :
    gpu(gpu_), q(q_, gpu), k(k_, gpu), v(v_, gpu), d_o(d_o_, gpu), o(q_.type(), q_.shape(), gpu),
    lse(Type::f32, lse_shape(q_), gpu), dq(q_.type(), q_.shape(), gpu), dk(k_.type(), k_.shape(), gpu),
    dv(v_.type(), v_.shape(), gpu) {}

Inputs GpuAttention::inputs() const {
  Inputs in;
  in.q = q.view(), in.k = k.view(), in.v = v.view();
  return in;
}

GpuPass::GpuPass(const GpuAttention& x, bool is_backward, const Options& how, const char* kernel) :
    tensors(x), backward(is_backward), options(how) {
  execution.device = x.gpu, execution.kernel = kernel;
  plan =
      std::make_unique<const Plan>(backward ? Plan::backward(x.inputs(), x.saved(), x.gradients(), options, execution)
                                            : Plan::forward(x.inputs(), x.outputs(), options, execution));
  workspace = std::make_unique<cases::DeviceMemory>(x.gpu, plan->workspace_size());
  execution.workspace = workspace->data(), execution.workspace_bytes = workspace->size();
}

void GpuPass::enqueue() const {
  if (backward)
    plan->run(tensors.inputs(), tensors.saved(), tensors.gradients(), options, execution);
  else
    plan->run(tensors.inputs(), tensors.outputs(), options, execution);
}

void wait_for_gpu() {
  const cuda::CurrentDevice current(first_gpu.id);
  cuda::check(cuda::driver().stream_synchronize(nullptr), "cuStreamSynchronize");
}

std::int64_t fitting_tokens(std::int64_t B, std::int64_t H, std::int64_t D, Device gpu) {
  constexpr std::int64_t most = 4096;
  constexpr double longest = 0.5;
  if (gpu.type == DeviceType::cuda) return most;
  const std::string simplest = gpu_kernels(Type::f32, gpu).back();
  const GpuTimer timer(gpu);
  for (std::int64_t N = 128;; N *= 2) {
    const Array x = random_normal(Type::f32, {B, N, H, D}, 1);
    const GpuAttention tensors(x, x, x, x, gpu);
    try {
      const GpuPass pass(tensors, false, {}, simplest.c_str());
      if (N == most || 4 * timer.median_seconds([&] { pass.enqueue(); }, 1) > longest) return N;
    } catch (const Error& error) {
      if (error.status() != TESSERA_UNSUPPORTED || N == 128) throw;
      return N / 2;  // a driver that ends long loops
    }
  }
}

GpuTimer::GpuTimer(Device where) : gpu(where) {
  if (gpu.type != DeviceType::cuda) return;
  const cuda::CurrentDevice current(first_gpu.id);
  cuda::check(cuda::driver().event_create(&start, 0), "cuEventCreate");
  cuda::check(cuda::driver().event_create(&stop, 0), "cuEventCreate");
}

GpuTimer::~GpuTimer() {
  if (gpu.type != DeviceType::cuda) return;
  const cuda::CurrentDevice current(first_gpu.id);
  if (start) cuda::driver().event_destroy(start);
  if (stop) cuda::driver().event_destroy(stop);
}

double GpuTimer::seconds(const std::function<void()>& enqueue) const {
  if (gpu.type != DeviceType::cuda) return seconds_of(enqueue);
  const cuda::CurrentDevice current(first_gpu.id);
  const cuda::Driver& d = cuda::driver();
  cuda::check(d.event_record(start, nullptr), "cuEventRecord");
  enqueue();
  cuda::check(d.event_record(stop, nullptr), "cuEventRecord");
  cuda::check(d.event_synchronize(stop), "cuEventSynchronize");
  float milliseconds = 0;
  cuda::check(d.event_elapsed(&milliseconds, start, stop), "cuEventElapsedTime");
  return milliseconds * 1e-3;
}

double GpuTimer::median_seconds(const std::function<void()>& enqueue, int runs) const {
  seconds(enqueue);
  std::vector<double> times;
  for (int run = 0; run < runs; ++run) times.push_back(seconds(enqueue));
  return median(std::move(times));
}

GpuGraph::GpuGraph(const std::function<void(cuda::StreamHandle)>& enqueue) {
  constexpr int relaxed_mode = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED
  const cuda::CurrentDevice current(first_gpu.id);
  const cuda::Driver& d = cuda::driver();
  try {
    cuda::check(d.stream_create(&stream, 0), "cuStreamCreate");
    enqueue(stream);  // kernels are compiled and loaded
    cuda::check(d.stream_synchronize(stream), "cuStreamSynchronize");
    cuda::check(d.stream_begin_capture(stream, relaxed_mode), "cuStreamBeginCapture");
    try {
      enqueue(stream);
    } catch (...) {
      d.stream_end_capture(stream, &graph);
      throw;
    }
    cuda::check(d.stream_end_capture(stream, &graph), "cuStreamEndCapture");
    cuda::check(d.graph_instantiate(&exec, graph, 0), "cuGraphInstantiate");
  } catch (...) {
    release();
    throw;
  }
}

GpuGraph::~GpuGraph() {
  const cuda::CurrentDevice current(first_gpu.id);
  release();
}

void GpuGraph::release() {
  const cuda::Driver& d = cuda::driver();
  if (exec) d.graph_exec_destroy(exec);
  if (graph) d.graph_destroy(graph);
  if (stream) d.stream_destroy(stream);
}

void GpuGraph::launch() const {
  const cuda::CurrentDevice current(first_gpu.id);
  cuda::check(cuda::driver().graph_launch(exec, nullptr), "cuGraphLaunch");
}

}  // namespace tessera::cli
