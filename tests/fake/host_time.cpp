// SPDX-License-Identifier: Apache-2.0
// Program: what a call costs on the host, through the C ABI, on a GPU that is not there: microseconds of processor time
// per attend over pages, by a plan and without one, per append and per merge, and what of it the fake driver takes.
// `fake_host_time [CALLS]`. Figures are of this machine; the bar, 6 us for an attend, is that of docs/gpu_kernels.md.
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>

#include "cuda/device.hpp"
#include "tests/fake/support.hpp"

using namespace tessera;
using namespace tessera::test;

namespace {

double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// The fastest of several rounds: others use this machine too.
double microseconds(int calls, const std::function<void()>& call) {
  constexpr int rounds = 9;
  double best = 1e9;
  for (int round = 0; round < rounds; ++round) {
    fake::machine().forget();
    const double start = thread_seconds();
    for (int n = 0; n < calls; ++n) call();
    best = std::min(best, 1e6 * (thread_seconds() - start) / calls);
  }
  return best;
}

// Tensors of the usual decoding step: 64 sequences, 32 heads over 8, pages of 16, bf16.
class Step {
 public:
  static constexpr std::int64_t B = 64, Hq = 32, Hk = 8, D = 128, P = 16, pages = 4096, entries = 512;
  Device where{DeviceType::cuda, fake::machine().device_of(9, 0)};

  Tensor tensor(Type type, std::initializer_list<std::int64_t> shape) {
    std::int64_t elements = 1;
    for (const std::int64_t size : shape) elements *= size;
    held.push_back(std::make_unique<DeviceMemory>(where, static_cast<std::size_t>(elements) * cases::size_of(type)));
    return {held.back()->data(), type, shape, where};
  }
  FakeCall attend() {
    FakeCall c{.pass = FakePass::forward};
    c.in.q = tensor(Type::bf16, {B, 1, Hq, D}), c.in.k = tensor(Type::bf16, {pages, P, Hk, D});
    c.in.v = tensor(Type::bf16, {pages, P, Hk, D}), c.in.seqused_k = tensor(Type::i32, {B});
    c.in.block_table = tensor(Type::i32, {B, entries});
    c.out.o = tensor(Type::bf16, {B, 1, Hq, D}), c.out.lse = tensor(Type::f32, {B, Hq, 1});
    c.options.causal = true;
    c.execution = {.device = where, .kernel = "decode"};
    return c;
  }
  AppendArgs append(const FakeCall& c) {
    AppendArgs a{.k_new = tensor(Type::bf16, {B, 1, Hk, D}), .v_new = tensor(Type::bf16, {B, 1, Hk, D})};
    a.k = c.in.k, a.v = c.in.v, a.seqused_k = c.in.seqused_k, a.block_table = c.in.block_table;
    a.rotary_cos = tensor(Type::f32, {8192, D / 2}), a.rotary_sin = tensor(Type::f32, {8192, D / 2});
    a.q = tensor(Type::bf16, {B, 1, Hq, D}), a.q_out = c.in.q;
    return a;
  }

 private:
  std::vector<std::unique_ptr<DeviceMemory>> held;
};

}  // namespace

int main(int argc, char** argv) {
  const int calls = argc > 1 ? std::atoi(argv[1]) : 2000;
  if (calls < 1) return std::fputs("usage: fake_host_time [CALLS]\n", stderr), 2;
  Step step;
  const cuda::CurrentDevice current(step.where.id);  // as a program that uses the CUDA runtime has it
  FakeCall call = step.attend();
  const Plan plan = planned(call);
  const Workspace workspace(call, plan);
  const AppendArgs appended = step.append(call);
  const Outputs part{.o = step.tensor(Type::f32, {Step::B, 1, Step::Hq, Step::D}),
                     .lse = step.tensor(Type::f32, {Step::B, Step::Hq, 1})};
  const std::vector<Outputs> parts{part, part};

  const auto by_plan = [&] { run(plan, call); };
  const auto at_once = [&] { forward(call.in, call.out, call.options, call.execution); };
  const auto append_one = [&] { append(appended, {.device = step.where}); };
  const auto merge_two = [&] { merge(parts, {.o = call.out.o, .lse = call.out.lse}, {.device = step.where}); };
  by_plan(), append_one(), merge_two();
  fake::machine().forget();
  by_plan();
  const std::size_t launches = fake::machine().launches.size(), driver_calls = fake::machine().calls.size();

  // What the fake driver's two launches and its record of them take.
  std::vector<std::byte> block(fake::machine().launches.at(0).parameters.size());
  const double fake_us = microseconds(calls, [&] {
    for (std::size_t n = 0; n < launches; ++n) {
      fake::Launch launch;
      launch.parameters = block;
      fake::machine().launches.push_back(std::move(launch));
    }
  });
  std::printf("attend: %zu launches, %zu calls of the driver\n", launches, driver_calls);
  std::printf("us of processor time per call; the record of launches alone takes %.2f\n", fake_us);
  std::printf("attend by a plan  %.2f\n", microseconds(calls, by_plan));
  std::printf("attend at once    %.2f\n", microseconds(calls, at_once));
  std::printf("append            %.2f\n", microseconds(calls, append_one));
  std::printf("merge             %.2f\n", microseconds(calls, merge_two));
  return fake::machine().complaints.empty() ? 0 : 1;
}
