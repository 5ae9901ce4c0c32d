// SPDX-License-Identifier: Apache-2.0
// What the tests of the Hopper and `mma` kernels on a GPU share: cases that tensor copies take, their judgement,
// repetitions of which every bit is compared, streams, graphs and company. Included by gpu_hopper_test.cpp,
// gpu_hopper_backward_test.cpp and gpu_mma_test.cpp; the cases say whether there is a backward pass.
#pragma once

#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <numeric>

#include "api/units.hpp"
#include "cases/random.hpp"
#include "cuda/jit/cache.hpp"
#include "tests/gpu/support.hpp"
#include "tests/support/company.hpp"

namespace tessera::test {

// --- against float64 -------------------------------------------------------------------------------------------------

// With addresses, strides and rows that tensor copies take: most random configurations have others.
inline Case aligned(Case c) {
  constexpr Style styles[] = {Style::contiguous, Style::heads_first, Style::broadcast};
  if (c.style == Style::gaps || c.style == Style::shifted || c.style == Style::mixed) c.style = styles[c.seed % 3];
  c.D = (c.D + 7) / 8 * 8, c.Dv = (c.Dv + 7) / 8 * 8;
  c.name += "_aligned";
  return c;
}

// Numbers that overflow, underflow or cancel in a careless softmax, over several tiles of keys, at every tile.
inline std::vector<Case> extreme_numbers() {
  std::vector<Case> all;
  for (const Distribution distribution : {Distribution::cold, Distribution::huge, Distribution::outlier})
    for (const api::HeadDims dims : {api::HeadDims{64, 64}, {128, 128}, {192, 128}, {192, 192}, {256, 256}})
      for (const Type type : {Type::f16, Type::bf16}) {
        Case c{.name = "extreme", .Nq = 150, .Nk = 700, .Hq = 2, .Hk = 1, .D = dims.D, .Dv = dims.Dv, .type = type};
        c.options.causal = all.size() % 2, c.distribution = distribution, c.seed = all.size() + 1;
        all.push_back(c);
      }
  return all;
}

// The problem of a case, as far as kernels are chosen by it.
inline Problem problem_of(const Case& c, Pass pass) {
  Problem p = api::plain_problem(pass, c.type, {c.D, c.dim_v()});
  p.options = c.options, p.options.scale = c.scale(), p.slopes = c.slopes == Slopes::none ? 0 : 1;
  if (c.f32_o) p.o_type = Type::f32;
  if (c.mask) p.mask = Broadcast{Type::u8, {1, 1, 1, 1}};
  if (c.bias) p.bias = Broadcast{c.bias_f32 ? Type::f32 : c.type, {1, 1, 1, 1}};
  if (pass == Pass::forward) return p;
  const auto set = [&](std::optional<Type>& gradient, bool wanted) {
    if (!wanted) gradient.reset();
    if (wanted && c.f32_grads) gradient = Type::f32;
  };
  set(p.dq, c.grads.dq), set(p.dk, c.grads.dk), set(p.dv, c.grads.dv);
  return p;
}

// A part of all cases, by the time that they take: most of it goes to compiling, once for each kernel. `unit_of`: the
// text of a case's kernels; cases of the same run in one process, which compiles them once.
inline std::vector<Case> cases_of_part(const std::vector<Case>& all, std::size_t part, std::size_t parts,
                                       const std::function<std::string(const Case&)>& unit_of) {
  std::multimap<std::string, Case> sorted;
  for (const Case& c : all) sorted.emplace(unit_of(c), c);
  constexpr std::size_t compiling = 8;  // as long as so many cases
  std::vector<std::size_t> times;
  const std::string* unit = nullptr;
  for (const auto& entry : sorted) {
    times.push_back(unit && *unit == entry.first ? 1 : 1 + compiling);
    unit = &entry.first;
  }
  const std::size_t total = std::accumulate(times.begin(), times.end(), std::size_t{0});
  std::vector<Case> chosen;
  std::size_t n = 0, before = 0;
  for (const auto& [text, c] : sorted) {
    if (before * parts / total == part) chosen.push_back(c);
    before += times[n++];
  }
  return chosen;
}

// The refusals of sm90/plan.cpp that a case of these may meet.
inline bool may_be_refused(const std::string& reason) {
  for (const char* known : {"tensor copies need 16", "this kernel has tiles up to 256", "need at least one of each",
                            "this kernel counts up to 536870912 tokens"})
    if (reason.find(known) != std::string::npos) return true;
  return false;
}

// What nothing but alignment and head dims can keep from tensor copies.
inline bool has_tokens(const Case& c) {
  if (c.Hq == 0 || c.batches() == 0 || c.endless_k > 1 << 29) return false;
  if (!c.packed()) return c.Nq > 0 && c.Nk > 0;
  return c.tokens_q() > 0 && c.tokens_k() > 0;
}

// Runs cases by name and judges them; what is refused must be something that tensor copies cannot take.
inline void expect_agreement(const std::vector<Case>& cases) {
  SuiteReport all;
  for (const Case& spec : cases) {
    const CaseReport report = run_case(spec, Execution{.device = gpu, .kernel = hopper_kernel});
    expect_ok(report);
    ++(report.skipped ? all.skipped : report.ok ? all.passed : all.failed);
    if (report.skipped) {
      EXPECT_TRUE(may_be_refused(report.messages.front())) << to_text(report);
      EXPECT_FALSE(spec.name.ends_with("_aligned") && has_tokens(spec)) << to_text(report);
    }
    all.cases.push_back(report);
  }
  std::cout << all.passed + all.failed << " cases ran, " << all.skipped << " were refused\n" << worst_table(all);
  EXPECT_GT(all.passed, all.skipped) << "a test in which nearly everything was refused has shown nothing";
}

// --- repetitions -----------------------------------------------------------------------------------------------------

// Fewer where each takes long: tools/gpu_tests.py under compute-sanitizer.
inline int repetitions() {
  const char* chosen = std::getenv("TESSERA_TEST_REPETITIONS");
  return chosen ? std::atoi(chosen) : 1000;
}

// More tiles than multiprocessors, so that which block takes which, and when, varies.
inline std::vector<Case> repeated() {
  constexpr Type f16 = Type::f16, bf16 = Type::bf16;
  Case everything{.name = "everything", .B = 2, .Nq = 700, .Nk = 600, .Hq = 8, .Hk = 2, .D = 64, .type = f16};
  everything.options = {.softcap = 5, .causal = true, .window_left = 300, .dropout = 0.2, .seed = 9};
  everything.bias = everything.mask = true, everything.bias_dims = {.b = false, .h = false};
  everything.mask_dims = {.b = false, .h = false};
  everything.slopes = Slopes::per_head, everything.sinks = Sinks::finite;
  std::vector<Case> all{
      {.name = "many_heads", .B = 2, .Nq = 1000, .Nk = 1000, .Hq = 32, .Hk = 32, .D = 64, .type = bf16},
      {.name = "causal_gqa", .B = 2, .Nq = 1500, .Nk = 1500, .Hq = 16, .Hk = 4, .D = 128, .type = bf16},
      {.name = "window", .B = 2, .Nq = 1500, .Nk = 1500, .Hq = 16, .Hk = 4, .D = 96, .type = f16},
      {.name = "unequal", .B = 2, .Nq = 700, .Nk = 900, .Hq = 16, .Hk = 16, .D = 192, .Dv = 128, .type = bf16},
      {.name = "wide_causal", .B = 2, .Nq = 900, .Nk = 900, .Hq = 12, .Hk = 12, .D = 256, .type = bf16},
      {.name = "wide_halves", .B = 2, .Nq = 500, .Nk = 700, .Hq = 18, .Hk = 2, .D = 256, .type = f16},
      {.name = "packed", .Hq = 16, .Hk = 2, .D = 128, .type = f16, .packed_q = {900, 0, 33, 129, 1200}},
      {.name = "used_lengths", .B = 3, .Nq = 600, .Nk = 800, .Hq = 16, .Hk = 1, .D = 64, .type = bf16},
      {.name = "dropout", .B = 2, .Nq = 700, .Nk = 700, .Hq = 16, .Hk = 16, .D = 128, .type = bf16},
      everything,
  };
  all[1].options.causal = all[4].options.causal = all[6].options.causal = all[8].options.causal = true;
  all[2].options.window_left = 200, all[2].options.window_right = 30;
  all[6].packed_k = {900, 50, 0, 300, 1200};
  all[7].used_q = {600, 70, 333}, all[7].used_k = {800, 555, 64}, all[7].f32_o = true;
  all[8].options.dropout = 0.1, all[8].options.seed = 7;
  return all;
}

// What a tensor on the GPU held when this was made; compared there, so that nothing is copied or waited for.
class Remembered {
 public:
  Remembered(const char* name, const Buffer& host, const Tensor& device) :
      name(name), now(device), bytes(static_cast<std::size_t>(host.elements()) * size_of(host.type())),
      before(gpu, bytes) {
    before.write(static_cast<const std::byte*>(host.tensor().data), bytes);
    different.fill(std::byte{0});
  }
  void forget() const {
    const auto address = reinterpret_cast<cuda::DevicePointer>(now.data);
    cuda::check(cuda::driver().memset_bytes(address, 0xFF, bytes, nullptr), "cuMemsetD8Async");
  }
  void compare() {
    void *a = now.data, *b = before.data(), *count = different.data();
    auto words = static_cast<unsigned>(bytes / 4);
    void* arguments[] = {&a, &b, &words, &count};
    kernel->launch({.grid = {64}, .block = {256}}, arguments);
  }
  void judge() {
    EXPECT_EQ(differences(), 0U) << name;
    forget(), compare();
    EXPECT_GT(differences(), 0U) << name << ": the comparison does not notice";
  }

 private:
  static constexpr const char* compare_text = R"(
extern "C" __global__ void compare(const unsigned* a, const unsigned* b, unsigned words, unsigned* different) {
  for (unsigned n = blockIdx.x * blockDim.x + threadIdx.x; n < words; n += gridDim.x * blockDim.x)
    if (a[n] != b[n]) atomicAdd(different, 1u);
})";

  unsigned differences() const {
    unsigned count = 0;
    different.read(reinterpret_cast<std::byte*>(&count), sizeof count);
    return count;
  }

  const char* name;
  Tensor now;
  std::size_t bytes;
  DeviceMemory before, different{gpu, sizeof(unsigned)};
  const cuda::LoadedKernel* kernel = cuda::find_kernel(compare_text, "compare", gpu.id);
};

// Of the backward pass, if the case has one; else of the forward pass. `repeats`: the options with which a backward
// pass is repeated, if they are others.
inline void expect_same_bits_each_time(const Case& spec, const std::string& kernel = hopper_kernel,
                                       const Options* repeats = nullptr) {
  SCOPED_TRACE(describe(spec));
  CaseData data = build(spec);
  OnGpu on(data, kernel);
  on.run();
  on.finish();
  std::vector<std::unique_ptr<Remembered>> results;
  const auto remember = [&](const char* name, const Buffer& host, const Tensor& device) {
    if (host) results.push_back(std::make_unique<Remembered>(name, host, device));
  };
  if (spec.backward) {
    const Gradients gradients = on.placed.gradients();
    remember("dq", data.dq, gradients.dq), remember("dk", data.dk, gradients.dk), remember("dv", data.dv, gradients.dv);
    remember("dbias", data.dbias, gradients.dbias), remember("dsinks", data.dsinks, gradients.dsinks);
  } else {
    remember("o", data.o, on.placed.outputs().o), remember("lse", data.lse, on.placed.outputs().lse);
  }
  if (repeats) on.plan_backward(*repeats);
  for (int run = repetitions(); run > 0; --run) {
    for (const auto& result : results) result->forget();
    if (spec.backward)
      on.backward();
    else
      on.forward();
    for (const auto& result : results) result->compare();
  }
  for (const auto& result : results) result->judge();
}

// --- streams, graphs -------------------------------------------------------------------------------------------------

inline void expect_same_bits_on_a_stream_and_in_a_graph(const Case& spec, const std::string& kernel = hopper_kernel) {
  CaseData direct = build(spec), streamed = build(spec), replayed = build(spec);
  OnGpu on_default(direct, kernel);
  on_default.run();
  on_default.finish();
  const Stream stream;
  OnGpu on_stream(streamed, kernel, stream), in_graph(replayed, kernel, stream);
  on_stream.run();
  on_stream.finish();
  expect_same_outputs(direct, streamed);

  const cuda::Driver& d = cuda::driver();
  constexpr int global_mode = 0;  // the strictest: nothing may synchronise or allocate
  cuda::GraphHandle graph = nullptr;
  cuda::GraphExecHandle exec = nullptr;
  cuda::check(d.stream_begin_capture(stream, global_mode), "cuStreamBeginCapture");
  in_graph.run();
  cuda::check(d.stream_end_capture(stream, &graph), "cuStreamEndCapture");
  cuda::check(d.graph_instantiate(&exec, graph, 0), "cuGraphInstantiate");
  for (int replay = 0; replay < 3; ++replay) {
    in_graph.upload();  // results become NaN again
    cuda::check(d.graph_launch(exec, stream), "cuGraphLaunch");
    in_graph.finish();
    expect_same_outputs(direct, replayed);
    for (Buffer* buffer : {&replayed.o, &replayed.lse, &replayed.dq, &replayed.dk, &replayed.dv})
      if (*buffer) buffer->restore();
  }
  d.graph_exec_destroy(exec);
  d.graph_destroy(graph);
}

// --- company ---------------------------------------------------------------------------------------------------------

// Lengths around the tiles of queries and of keys, and every option, with heads of one size.
inline std::vector<Case> lone_sequences(std::int64_t D, Type type, bool backward) {
  std::vector<Case> all = mixes();
  for (const std::int64_t Nq : {1, 64, 65, 129, 300}) {
    const bool causal = Nq % 2;
    Case c{.name = "length", .Nq = Nq, .Nk = causal ? Nq + 40 : 520 - Nq, .Hq = 4, .Hk = 2};
    c.name += std::to_string(Nq), c.options.causal = causal;
    all.push_back(c);
  }
  for (Case& c : all) c.D = D, c.Dv = 0, c.type = type, c.backward = backward;
  return all;
}

inline void expect_same_bits_in_company(const Case& spec, const std::string& kernel = hopper_kernel) {
  SCOPED_TRACE(spec.name);
  Case lone = spec;
  lone.options.batch0 = place;  // dropout counts sequences: the lone one keeps its number
  const std::optional<CaseData> alone = ran_on(kernel, lone);
  ASSERT_TRUE(alone) << "was refused";
  for (const Company& other : companies(spec)) {
    SCOPED_TRACE(other.name);
    CaseData company = build(other.spec);
    take_place(*alone, company);
    OnGpu on(company, kernel);
    on.run();
    on.finish();
    expect_same_sequence(*alone, company);
    if (testing::Test::HasFatalFailure()) return;
  }
}

}  // namespace tessera::test
