// SPDX-License-Identifier: Apache-2.0
// Implements cli/gpu.hpp over the CUDA driver.
// Everything runs on the first GPU and its default stream.
#include "cli/gpu.hpp"

#include <sstream>

#include "cli/failure.hpp"
#include "cli/report.hpp"
#include "cli/timing.hpp"
#include "cuda/device.hpp"

namespace tessera::cli {
namespace {

std::size_t bytes_of(const Tensor& t) { return static_cast<std::size_t>(t.elements()) * size_of(t.type); }

Tensor contiguous(Type type, const std::vector<std::int64_t>& shape) {
  Tensor t;
  t.type = type, t.ndim = static_cast<std::int32_t>(shape.size()), t.device = first_gpu;
  std::int64_t stride = 1;
  for (std::size_t d = shape.size(); d-- > 0;) t.shape[d] = shape[d], t.strides[d] = stride, stride *= shape[d];
  return t;
}

std::vector<std::int64_t> lse_shape(const Array& q) { return {q.shape()[0], q.shape()[2], q.shape()[1]}; }

}  // namespace

std::string missing_gpu() { return cuda::find_driver().reason; }

void require_gpu(const std::string& what) {
  if (const std::string reason = missing_gpu(); !reason.empty()) throw Failure(what + " needs a GPU: " + reason + ".");
}

std::string gpu_name() {
  const cuda::Properties& p = cuda::properties(first_gpu.id);
  return format("%s, %s, %d SMs", p.name.c_str(), p.architecture().c_str(), p.multiprocessors);
}

std::vector<std::string> gpu_kernels(Type type) {
  const Tensor x(nullptr, type, {1, 64, 1, 64}, first_gpu);
  Inputs inputs;
  inputs.q = inputs.k = inputs.v = x;
  std::vector<std::string> names;
  std::istringstream lines(tessera::info());
  lines.exceptions(std::ios::badbit);  // out of memory is not the end of the text
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    words.exceptions(std::ios::badbit);
    std::string word;
    words >> word;
    if (word != "kernels") continue;
    while (words >> word) {
      if (word.back() == ',') word.pop_back();
      try {
        Plan::forward(inputs, {.o = x, .lse = {}}, {}, {.device = first_gpu, .kernel = word.c_str()});
        names.push_back(word);
      } catch (const Error& error) {
        if (error.status() != TESSERA_UNSUPPORTED) throw;  // expected of CPU kernels: they refuse GPU tensors
      }
    }
  }
  return names;
}

GpuArray::GpuArray(Type type, const std::vector<std::int64_t>& sizes) :
    shape(contiguous(type, sizes)), memory(std::make_unique<cases::DeviceMemory>(first_gpu, bytes_of(shape))) {
  shape.data = memory->data();
}

GpuArray::GpuArray(const Array& host) : GpuArray(host.type(), host.shape()) {
  memory->write(host.data<std::byte>(), host.bytes());
}

Tensor GpuArray::view() const { return shape; }

void GpuArray::read(Array& host) const { memory->read(host.data<std::byte>(), host.bytes()); }

GpuAttention::GpuAttention(const Array& q_, const Array& k_, const Array& v_, const Array& d_o_) :
    q(q_), k(k_), v(v_), d_o(d_o_), o(q_.type(), q_.shape()), lse(Type::f32, lse_shape(q_)), dq(q_.type(), q_.shape()),
    dk(k_.type(), k_.shape()), dv(v_.type(), v_.shape()) {}

Inputs GpuAttention::inputs() const {
  Inputs in;
  in.q = q.view(), in.k = k.view(), in.v = v.view();
  return in;
}

GpuPass::GpuPass(const GpuAttention& x, bool is_backward, const Options& how, const char* kernel) :
    tensors(x), backward(is_backward), options(how) {
  execution.kernel = kernel;
  plan =
      std::make_unique<const Plan>(backward ? Plan::backward(x.inputs(), x.saved(), x.gradients(), options, execution)
                                            : Plan::forward(x.inputs(), x.outputs(), options, execution));
  workspace = std::make_unique<cases::DeviceMemory>(first_gpu, plan->workspace_size());
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

GpuTimer::GpuTimer() {
  const cuda::CurrentDevice current(first_gpu.id);
  cuda::check(cuda::driver().event_create(&start, 0), "cuEventCreate");
  cuda::check(cuda::driver().event_create(&stop, 0), "cuEventCreate");
}

GpuTimer::~GpuTimer() {
  const cuda::CurrentDevice current(first_gpu.id);
  if (start) cuda::driver().event_destroy(start);
  if (stop) cuda::driver().event_destroy(stop);
}

double GpuTimer::seconds(const std::function<void()>& enqueue) const {
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

}  // namespace tessera::cli
