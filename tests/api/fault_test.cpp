// SPDX-License-Identifier: Apache-2.0
// Every entry point of the C ABI with an allocation that fails: for every n the n-th of the first call in a process,
// once alone and once with all that follow. Nothing ends the process, a call that fails has written nothing and says
// what is wrong, and the next call gives the bits of a process in which nothing failed. And threads that cannot be had.
// Links tessera_cases and faults.cpp. Implements the header's "Rules of the ABI".
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <thread>

#include "tests/support/faults.hpp"
#include "tests/support/support.hpp"

namespace tessera::test {
namespace {

// One call, with everything that it points to.
struct Call {
  std::string name;
  std::function<tessera_status()> run;
  std::vector<const Buffer*> outputs{};
  tessera_status expected = TESSERA_OK;
};

// What a child tells.
struct Report {
  long allocations, failed;
  std::uint64_t result;
  char fault[400];  // none: empty
};

std::uint64_t fingerprint(const std::vector<const Buffer*>& buffers) {
  std::uint64_t sum = 0;
  for (const Buffer* buffer : buffers) sum = sum * 1099511628211u + buffer->fingerprint();
  return sum;
}

bool is_out_of_memory(const std::string& sentence) {
  return sentence == "out of memory" ||
         (sentence.starts_with("workspace: ") && sentence.ends_with(" bytes could not be allocated"));
}

// What is wrong with a call during which memory ran out, or "".
std::string fault_of(tessera_status status, const std::string& sentence, bool untouched, const Call& call) {
  if (status == TESSERA_OK && call.expected == TESSERA_OK) return "";  // it could do without
  const std::string told = "status " + std::to_string(status) + ": " + sentence;
  if (!untouched) return "an output was written by a call that failed; " + told;
  if (status == TESSERA_OUT_OF_MEMORY) return is_out_of_memory(sentence) ? "" : told;
  if (status != call.expected) return told;
  return sentence.empty() ? "a failed call without a sentence" : "";
}

// Runs body in a forked child, whose first call of the library it is.
Report in_child(const std::function<void(Report&)>& body) {
  auto* shared =
      static_cast<Report*>(mmap(nullptr, sizeof(Report), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  *shared = {};
  const pid_t child = fork();
  if (child == 0) {
    alarm(100);
    body(*shared);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  Report report = *shared;
  munmap(shared, sizeof(Report));
  if (WIFSIGNALED(status) || WEXITSTATUS(status) != 0)
    std::snprintf(report.fault, sizeof(report.fault), "the process ended with status %d", status);
  return report;
}

Report with_failure(const Call& call, long n, Failing failing) {
  return in_child([&](Report& report) {
    const std::uint64_t before = fingerprint(call.outputs);
    fail_allocations(n, failing);
    const tessera_status status = call.run();
    const Allocations allocations = stop_counting();
    report.allocations = allocations.counted, report.failed = allocations.failed;
    const std::string sentence = status == TESSERA_OK ? "" : tessera_last_error();
    std::string fault = fault_of(status, sentence, fingerprint(call.outputs) == before, call);
    for (int again = 0; again < 2 && fault.empty(); ++again)
      if (const tessera_status later = call.run(); later != call.expected)
        fault = "the next call has status " + std::to_string(later) + ": " + tessera_last_error();
    report.result = fingerprint(call.outputs);
    std::strncpy(report.fault, fault.c_str(), sizeof(report.fault) - 1);
  });
}

void expect_survives(const Call& call) {
  const Report whole = with_failure(call, 0, Failing::once);
  ASSERT_STREQ(whole.fault, "") << call.name;
  ASSERT_GT(whole.allocations, 0) << call.name << ": nothing to fail";
  for (const Failing failing : {Failing::once, Failing::always})
    for (long n = 1;; ++n) {
      const Report report = with_failure(call, n, failing);
      ASSERT_STREQ(report.fault, "") << call.name << ": allocation " << n
                                     << (failing == Failing::always ? " and all that follow" : "");
      ASSERT_EQ(report.result, whole.result) << call.name << ": other bits after allocation " << n;
      if (report.failed == 0) break;
      ASSERT_LT(n, 100000) << call.name;
    }
}

// --- passes ---------------------------------------------------------------------------------------------------------

// Everything that a pass can ask for: unused rows to clear, dBias that is broadcast, sinks, several heads of a KV head.
Case rich(Type type) {
  Case c{.name = "rich", .B = 2, .Nq = 70, .Nk = 200, .Hq = 4, .Hk = 2, .D = 16, .type = type};
  c.used_q = {70, 9}, c.used_k = {200, 13};
  c.bias = true, c.bias_dims = {.b = false, .h = true, .i = true, .j = true};
  c.sinks = Sinks::finite;
  return c;
}

// Sequences with few queries beside others, and gaps.
Case packed(Type type) {
  Case c{.name = "packed", .Hq = 4, .Hk = 2, .D = 32, .type = type};
  c.packed_q = {1, 130, 3}, c.packed_k = {300, 140, 290}, c.tail_q = 5, c.tail_k = 7;
  return c;
}

Case decode(Type type) {
  return {.name = "decode", .B = 3, .Nq = 1, .Nk = 2000, .Hq = 8, .Hk = 2, .D = 64, .type = type, .backward = false};
}

// The C structs of a case; the backward pass reads what the forward pass has left.
struct Structs {
  CaseData data;
  detail::CInputs in;
  detail::COutputs out;
  detail::CSaved saved;
  detail::CGradients gradients;
  tessera_options options;
  tessera_execution execution;

  Structs(const Case& spec, const char* kernel, int threads) :
      data(build(spec)), in(data.inputs()), out(data.outputs()), saved(data.saved()), gradients(data.gradients()),
      options(detail::to_c(data.options())), execution(detail::to_c(Execution{.threads = threads, .kernel = kernel})) {}

  // In a child, so that the process has not called the library: O and LSE come back through shared memory.
  void compute_saved() {
    const auto o = data.o.bytes(), lse = data.lse.bytes();
    auto* room = static_cast<std::byte*>(
        mmap(nullptr, o.size() + lse.size(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    const Report report = in_child([&](Report& r) {
      if (tessera_forward(&in.view, &out.view, &options, &execution) != TESSERA_OK)
        std::strncpy(r.fault, tessera_last_error(), sizeof(r.fault) - 1);
      std::copy(o.begin(), o.end(), room);
      std::copy(lse.begin(), lse.end(), room + o.size());
    });
    ASSERT_STREQ(report.fault, "");
    std::copy(room, room + o.size(), o.begin());
    std::copy(room + o.size(), room + o.size() + lse.size(), lse.begin());
    munmap(room, o.size() + lse.size());
  }

  std::vector<const Buffer*> gradient_buffers() const {
    std::vector<const Buffer*> all;
    for (const Buffer* b : {&data.dq, &data.dk, &data.dv, &data.dbias, &data.dsinks})
      if (*b) all.push_back(b);
    return all;
  }
};

class Passes : public testing::TestWithParam<std::tuple<std::string, Type>> {};

TEST_P(Passes, ForwardAndBackward) {
  const auto& [kernel, type] = GetParam();
  // Asked in a child: the process itself never calls the library, so that children's calls are first ones.
  const Report here = in_child([&, kernel = kernel](Report& r) {
    const std::vector<std::string> names = available_kernels();
    r.result = std::find(names.begin(), names.end(), kernel) != names.end();
  });
  if (!here.result) GTEST_SKIP() << kernel << " does not run here";
  for (Case spec : {rich(type), packed(type), decode(type)}) {
    if (kernel == "reference") spec.D = 4;  // it is slow
    Structs s(spec, kernel.c_str(), 3);
    const std::string name = kernel + " " + spec.name;
    expect_survives({.name = name + " forward",
                     .run = [&] { return tessera_forward(&s.in.view, &s.out.view, &s.options, &s.execution); },
                     .outputs = {&s.data.o, &s.data.lse}});
    if (!spec.backward) continue;
    ASSERT_NO_FATAL_FAILURE(s.compute_saved());
    const auto backward = [&] {
      return tessera_backward(&s.in.view, &s.saved.view, &s.gradients.view, &s.options, &s.execution);
    };
    expect_survives({.name = name + " backward", .run = backward, .outputs = s.gradient_buffers()});
  }
}

INSTANTIATE_TEST_SUITE_P(
    Kernels, Passes,
    testing::Combine(testing::Values("reference", "sse4", "avx2", "avx512", "avx512bf16", "amx", "neon"),
                     testing::Values(Type::f32, Type::bf16)),
    [](const auto& info) { return std::get<0>(info.param) + "_" + cases::name_of(std::get<1>(info.param)); });

TEST(Plans, MadeAndRun) {
  Structs s(rich(Type::f32), nullptr, 2);
  s.compute_saved();
  // A plan that could not be made is not there; one that was made is run.
  const auto forward = [&] {
    tessera_plan* plan = nullptr;
    tessera_status status = tessera_plan_forward(&s.in.view, &s.out.view, &s.options, &s.execution, &plan);
    if ((status == TESSERA_OK) != (plan != nullptr)) return TESSERA_INTERNAL;
    if (status == TESSERA_OK && std::strlen(tessera_plan_describe(plan)) == 0) status = TESSERA_INTERNAL;
    if (status == TESSERA_OK)
      status = tessera_plan_run_forward(plan, &s.in.view, &s.out.view, &s.options, &s.execution);
    tessera_plan_destroy(plan);
    return status;
  };
  expect_survives({.name = "forward plan", .run = forward, .outputs = {&s.data.o, &s.data.lse}});
  const auto backward = [&] {
    tessera_plan* plan = nullptr;
    tessera_status status =
        tessera_plan_backward(&s.in.view, &s.saved.view, &s.gradients.view, &s.options, &s.execution, &plan);
    if (status == TESSERA_OK)
      status = tessera_plan_run_backward(plan, &s.in.view, &s.saved.view, &s.gradients.view, &s.options, &s.execution);
    tessera_plan_destroy(plan);
    return status;
  };
  expect_survives({.name = "backward plan", .run = backward, .outputs = s.gradient_buffers()});
}

// A part of a problem: to a state, at positions of its own; gradients by segments of queries.
TEST(Plans, Parts) {
  Case spec = rich(Type::bf16);
  spec.options.part_invariant = true, spec.options.segment_rows = 64, spec.options.row0 = spec.options.col0 = 0;
  Structs s(spec, nullptr, 2);
  s.compute_saved();
  const Buffer o(Type::f32, {spec.B, spec.Nq, spec.Hq, spec.dim_v()});
  const Buffer m(Type::f32, {spec.B, spec.Hq, spec.Nq}), l(Type::f64, {spec.B, spec.Hq, spec.Nq});
  const Buffer places = filled(Type::i64, {spec.B}, 192);
  Inputs in = s.data.inputs();
  in.seq_row0 = in.seq_col0 = in.seq_batch0 = places.tensor();
  const detail::CInputs inputs(in);
  const detail::COutputs state({.state = {o.tensor(), m.tensor(), l.tensor()}});
  expect_survives({.name = "forward to a state",
                   .run = [&] { return tessera_forward(&inputs.view, &state.view, &s.options, &s.execution); },
                   .outputs = {&o, &m, &l}});
  const auto backward = [&] {
    return tessera_backward(&inputs.view, &s.saved.view, &s.gradients.view, &s.options, &s.execution);
  };
  expect_survives({.name = "backward by segments", .run = backward, .outputs = s.gradient_buffers()});
}

// --- the rest of the ABI --------------------------------------------------------------------------------------------

TEST(Faults, Merge) {
  const Shape o{2, 40, 3, 8}, lse{2, 3, 40};
  const Buffer o1 = filled(Type::f32, o, 1), o2 = filled(Type::f32, o, 3);
  const Buffer lse1 = filled(Type::f32, lse, 0.5), lse2 = filled(Type::f32, lse, -1);
  const Buffer merged_o(Type::f32, o), merged_lse(Type::f32, lse);
  const detail::COutputs first({.o = o1.tensor(), .lse = lse1.tensor()});
  const detail::COutputs second({.o = o2.tensor(), .lse = lse2.tensor()});
  const detail::COutputs merged({.o = merged_o.tensor(), .lse = merged_lse.tensor()});
  const tessera_outputs partials[] = {first.view, second.view};
  const tessera_execution execution = detail::to_c(Execution{.threads = 3});
  expect_survives({.name = "merge",
                   .run = [&] { return tessera_merge(partials, 2, &merged.view, &execution); },
                   .outputs = {&merged_o, &merged_lse}});
}

TEST(Faults, Append) {
  const Buffer k_new = filled(Type::f16, {2, 40, 3, 8}, 1), q = filled(Type::f16, {2, 40, 6, 8}, 2);
  const Buffer cos = filled(Type::f32, {50, 4}, 0.5), sin = filled(Type::f32, {50, 4}, 0.25);
  const Buffer k(Type::bf16, {12, 8, 3, 8}), v(Type::bf16, {12, 8, 3, 8}), q_out(Type::f16, {2, 40, 6, 8});
  const Buffer used = of(Type::i32, {2}, {44, 40}), status(Type::i32, {1});
  const Buffer table = of(Type::i32, {2, 6}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 99});
  AppendArgs args{.k_new = k_new.tensor(), .v_new = k_new.tensor(), .k = k.tensor(), .v = v.tensor()};
  args.seqused_k = used.tensor(), args.block_table = table.tensor(), args.status = status.tensor();
  args.rotary_cos = cos.tensor(), args.rotary_sin = sin.tensor(), args.q = q.tensor(), args.q_out = q_out.tensor();
  const detail::CAppendArgs view(args);
  const tessera_execution execution = detail::to_c(Execution{.threads = 3});
  expect_survives({.name = "append",
                   .run = [&] { return tessera_append(&view.view, &execution); },
                   .outputs = {&k, &v, &q_out, &status}});
}

TEST(Faults, DropoutMask) {
  const Buffer buffer(Type::u8, {2, 3, 30, 40});
  const detail::CTensor mask(buffer.tensor());
  const tessera_options options = detail::to_c(Options{.dropout = 0.25, .seed = 5});
  const tessera_execution execution = detail::to_c(Execution{.threads = 3});
  expect_survives({.name = "dropout mask",
                   .run = [&] { return tessera_dropout_mask(mask, nullptr, &options, &execution); },
                   .outputs = {&buffer}});
}

TEST(Faults, SentencesOfErrors) {
  Structs s(rich(Type::f32), "nonsense", 1);
  expect_survives({.name = "list of kernels",
                   .run = [&] { return tessera_forward(&s.in.view, &s.out.view, &s.options, &s.execution); },
                   .outputs = {&s.data.o, &s.data.lse},
                   .expected = TESSERA_INVALID_ARGUMENT});
  expect_survives({.name = "no inputs",
                   .run = [&] { return tessera_forward(nullptr, &s.out.view, nullptr, nullptr); },
                   .expected = TESSERA_INVALID_ARGUMENT});
}

// The status stays, although there is no memory for its sentence.
TEST(Faults, NoMemoryForTheSentence) {
  bool seen = false;
  for (long n = 1; n < 1000 && !seen; ++n) {
    const Report report = in_child([&](Report& r) {
      fail_allocations(n, Failing::always);
      const tessera_status status = tessera_forward(nullptr, nullptr, nullptr, nullptr);
      stop_counting();
      if (status == TESSERA_INVALID_ARGUMENT) std::strncpy(r.fault, tessera_last_error(), sizeof(r.fault) - 1);
    });
    seen = std::string(report.fault) == "there was no memory for the sentence that says what is wrong";
  }
  EXPECT_TRUE(seen);
}

// Without what stands in parentheses: the loader's own words, which are fewer when memory is short.
std::string plain(const std::string& info) {
  std::string out;
  int depth = 0;
  for (const char c : info) {
    depth += c == '(';
    if (depth == 0) out += c;
    depth -= c == ')';
  }
  return out;
}

// What was told without memory must not be kept.
TEST(Faults, Info) {
  setenv("TESSERA_NVRTC", "/nowhere/libnvrtc.so", 1);      // the real one ends a process in which it cannot allocate
  setenv("TESSERA_VULKAN", "/nowhere/libvulkan.so.1", 1);  // the real one takes it for a driver that does not fit
  const auto hash = [](const char* info) { return std::hash<std::string>()(plain(info)); };
  const Report whole = in_child([&](Report& r) {
    fail_allocations(0);
    const char* told = tessera_info();
    r.allocations = stop_counting().counted;
    r.result = hash(told);
  });
  ASSERT_GT(whole.allocations, 0);
  for (const Failing failing : {Failing::once, Failing::always})
    for (long n = 1;; ++n) {
      const Report report = in_child([&](Report& r) {
        fail_allocations(n, failing);
        const char* told = tessera_info();
        r.failed = stop_counting().failed;
        const bool right = (!*told && is_out_of_memory(tessera_last_error())) || hash(told) == whole.result;
        const char* later = tessera_info();
        if (!right) std::snprintf(r.fault, sizeof(r.fault), "told: %s", told);
        if (hash(later) != whole.result) std::snprintf(r.fault, sizeof(r.fault), "and then: %s", later);
      });
      ASSERT_STREQ(report.fault, "") << "allocation " << n << " of " << whole.allocations
                                     << (failing == Failing::always ? " and all that follow" : "");
      if (report.failed == 0) break;
    }
}

// --- the shared library ---------------------------------------------------------------------------------------------

#if !TESSERA_TEST_SANITIZED
// Opened by dlopen, as Python does, its thread-local variables would be made when a thread first needs them: the C
// library ends a process that has no memory for them.
TEST(Faults, FirstErrorOfAThreadInAnOpenedLibrary) {
  void* library = dlopen(TESSERA_SHARED_LIBRARY, RTLD_NOW | RTLD_LOCAL);
  ASSERT_TRUE(library) << dlerror();
  const auto forward = reinterpret_cast<decltype(&tessera_forward)>(dlsym(library, "tessera_forward"));
  const auto last_error = reinterpret_cast<decltype(&tessera_last_error)>(dlsym(library, "tessera_last_error"));
  for (const Failing failing : {Failing::once, Failing::always})
    for (long n = 1;; ++n) {
      const Report report = in_child([&](Report& r) {
        std::thread([&] {
          fail_allocations(n, failing);
          const tessera_status status = forward(nullptr, nullptr, nullptr, nullptr);
          r.failed = stop_counting().failed;
          const std::string sentence = last_error();
          if (status != TESSERA_INVALID_ARGUMENT && !(status == TESSERA_OUT_OF_MEMORY && is_out_of_memory(sentence)))
            std::snprintf(r.fault, sizeof(r.fault), "status %d: %s", status, sentence.c_str());
        }).join();
      });
      ASSERT_STREQ(report.fault, "") << "allocation " << n;
      if (report.failed == 0) break;
    }
}

// --- threads --------------------------------------------------------------------------------------------------------

TEST(Faults, FewerThreadsThanAskedFor) {
  Structs s(rich(Type::f32), nullptr, 6);
  std::uint64_t expected = 0;
  for (const int allowed : {-1, 0, 1, 3}) {
    const Report report = in_child([&](Report& r) {
      allow_threads(allowed);
      for (int call = 0; call < 3; ++call)
        if (tessera_forward(&s.in.view, &s.out.view, &s.options, &s.execution) != TESSERA_OK)
          std::strncpy(r.fault, tessera_last_error(), sizeof(r.fault) - 1);
      r.result = fingerprint({&s.data.o, &s.data.lse});
    });
    ASSERT_STREQ(report.fault, "") << allowed;
    if (allowed == -1) expected = report.result;
    EXPECT_EQ(report.result, expected) << allowed;
  }
}
#endif

}  // namespace
}  // namespace tessera::test
